"""What the measurements are held to: ratios within one run, and on a GPU, times of one H200."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dtorch_core.bench import exchange, gpu_exchange, own_gpus
from dtorch_core.bench.cells import Cell
from dtorch_core.bench.collectives import PROCESSES
from dtorch_core.bench.exchange import CROWD, QUEUE
from dtorch_core.bench.floors import FLOOR, HAND_OFF
from dtorch_core.bench.groups import DTORCH, THREADED
from dtorch_core.bench.peers import GLOO
from dtorch_core.bench.processes import MEMCPY, SOCKET
from dtorch_core.bench.report import Goal, Measured, OwnGpus
from dtorch_core.bench.sizes import KIB, MIB, size
from dtorch_core.bench.timing import Series

RANKS = 2
LARGE = 64 * MIB

OVER_GLOO = {"all_reduce": 4.0, "all_gather": 5.5, "reduce_scatter": 6.0, "all_to_all": 1.8}
"""How many times as fast as Gloo collectives of 64 MiB by two process ranks are."""
OVER_QUEUE = {KIB: 5.0, LARGE: 8.0}
"""How many times as fast as a queue the four steps between processes are."""

ON_GPU = {
    (DTORCH, 2): {MIB: 110e-6, 256 * MIB: 0.6e-3},
    (PROCESSES, 2): {MIB: 0.45e-3, 256 * MIB: 0.9e-3},
    (PROCESSES, 4): {MIB: 1.0e-3, 256 * MIB: 1.8e-3},
}
"""all_reduce by so many ranks of one H200: seconds at most."""
OF_COPY_ON_GPU = {2: 0.68, 4: 0.73}
"""Thread ranks of one GPU: by world size, at least this part of the bandwidth of a copy. It is four fifths of what one
kernel reaches that reads every input once and writes every output once: 0.85 and 0.91."""
OF_COPY_QUEUED = 0.8
"""The same, of calls that are queued: the hosts run ahead, and what is left is the kernels."""
ON_GPU_LARGE = 256 * MIB, ("all_reduce", "reduce_scatter", "all_gather")


def of_all(measured: Measured) -> Iterator[Goal]:
    """Those goals of which the measurements were made."""
    for cell, series in measured.collectives.items():
        if cell.device != "cpu":
            yield from _on_gpu(cell, series)
        elif cell.ranks == RANKS:
            yield from _of_threads(cell, series)
            yield from _of_processes(cell, series)

    yield from of_exchange(measured.exchange)
    yield from of_gpu_exchange(measured.gpu_exchange)
    yield from of_own_gpus(measured.own_gpus)


def _of_threads(cell: Cell, series: Series) -> Iterator[Goal]:
    if DTORCH not in series:
        return

    what = _named(cell)
    if cell.small:
        least = 1.5 if cell.operation == "barrier" else 1.3
        yield Goal(f"{what}: times as fast as {THREADED}", series.ratio(THREADED, DTORCH), least)
        if (cell.operation, cell.nbytes) == ("all_reduce", KIB):
            yield Goal(f"{what}: times a bare hand-off there and back", series.ratio(DTORCH, HAND_OFF), at_most=0.9)
    elif cell.nbytes == LARGE:
        if cell.operation == "all_reduce":
            if GLOO in series:
                yield Goal(f"{what}: times as fast as {GLOO}", series.ratio(GLOO, DTORCH), at_least=5.5)

            yield Goal(f"{what}: times the blocked floor", series.ratio(DTORCH, FLOOR), at_most=1.25)

        over = {"all_reduce": 8.0, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 0.9}.get(cell.operation)
        if over is not None:
            yield Goal(f"{what}: times as fast as {THREADED}", series.ratio(THREADED, DTORCH), over)


def _of_processes(cell: Cell, series: Series) -> Iterator[Goal]:
    if PROCESSES not in series:
        return

    what = f"{_named(cell)}, processes"
    least = OVER_GLOO.get(cell.operation) if cell.nbytes == LARGE else 3.5 if cell.small else None
    if least is not None and GLOO in series:
        yield Goal(f"{what}: times as fast as {GLOO}", series.ratio(GLOO, PROCESSES), least)

    if (cell.operation, cell.nbytes) == ("all_reduce", KIB):
        yield Goal(f"{what}: times a round trip through a {SOCKET}", series.ratio(PROCESSES, SOCKET), at_most=1.2)

    if (cell.operation, cell.nbytes) == ("all_reduce", LARGE):
        yield Goal(f"{what}: times the blocked floor", series.ratio(PROCESSES, FLOOR), at_most=1.8)


def _on_gpu(cell: Cell, series: Series) -> Iterator[Goal]:
    what = f"{_named(cell)}, {cell.ranks} ranks, one GPU"
    for (name, ranks), bounds in ON_GPU.items():
        most = None if cell.queued else bounds.get(cell.nbytes)
        if cell.operation == "all_reduce" and cell.ranks == ranks and name in series and most is not None:
            who = "" if name == DTORCH else ", processes"
            yield Goal(f"{what}{who}: milliseconds", series.seconds(name) * 1e3, at_most=most * 1e3)

    nbytes, operations = ON_GPU_LARGE
    least = OF_COPY_ON_GPU.get(cell.ranks)
    if cell.nbytes == nbytes and cell.operation in operations and DTORCH in series and least is not None:
        part = series.fraction(DTORCH, [FLOOR])
        yield Goal(f"{what}: part of the bandwidth of a copy", part, OF_COPY_QUEUED if cell.queued else least)


def of_exchange(results: Mapping[int, Series]) -> Iterator[Goal]:
    """The exchange is two wake-ups and little else, whatever the size and whoever else waits."""
    for nbytes, series in results.items():
        text = f"exchange, {size(nbytes)}"
        if exchange.OF_THREADS in series:
            steps, crowded = series.ratio(exchange.OF_THREADS, HAND_OFF), exchange.CROWDED
            yield Goal(f"{text}: times a bare hand-off there and back", steps, at_most=1.4)
            crowd = series.ratio(crowded, exchange.OF_THREADS)
            yield Goal(f"{text}: times as long with {CROWD} other waits", crowd, at_most=1.3)

        if exchange.OF_PROCESSES in series:
            yield from _between_processes(f"{text}, processes", nbytes, series)


def _between_processes(text: str, nbytes: int, series: Series) -> Iterator[Goal]:
    if nbytes in OVER_QUEUE:
        speedup = series.ratio(QUEUE, exchange.OF_PROCESSES)
        yield Goal(f"{text}: times as fast as {QUEUE}", speedup, OVER_QUEUE[nbytes])

    if nbytes == LARGE:
        copies = series.ratio(exchange.PUBLISHED, MEMCPY)
        yield Goal(f"{text}, src_set: times a {MEMCPY}", copies, at_most=1.7)
        same = series.ratio(exchange.PUBLISHED_EMPTY, exchange.PUBLISHED_SMALL)
        yield Goal(f"{text}, src_set of empty(): times that of 1 KiB", same, at_most=1.5)


def of_gpu_exchange(results: Mapping[int, Series]) -> Iterator[Goal]:
    """Microseconds of one H200, whatever the size."""
    for nbytes, series in results.items():
        for name, most in ((gpu_exchange.STEPS, 130), (gpu_exchange.WHOLE, 450)):
            yield Goal(f"{name}, {size(nbytes)}: microseconds", series.seconds(name) * 1e6, at_most=most)


def of_own_gpus(results: Mapping[OwnGpus, Series]) -> Iterator[Goal]:
    """What a group costs beside NCCL itself: microseconds of a small call, a part of a large one."""
    for of, series in results.items():
        what = f"all_reduce, {size(of.nbytes)}, {of.ranks} {of.ranks_as} with a GPU each"
        if of.nbytes <= MIB:
            yield Goal(f"{what}: microseconds over {own_gpus.RAW}", own_gpus.more(series) * 1e6, at_most=25)
        elif of.nbytes == ON_GPU_LARGE[0]:
            ratio = series.ratio(own_gpus.OURS, own_gpus.RAW)
            yield Goal(f"{what}: times {own_gpus.RAW}", ratio, at_most=1.05)


def _named(cell: Cell) -> str:
    return f"{cell.operation}, {cell.words}" if cell.nbytes else cell.operation
