"""What the measurements are held to: ratios within one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.cells import Cell, size
from benchmarks.exchange import CROWD, QUEUE
from benchmarks.floors import FLOOR, HAND_OFF
from benchmarks.gloo import GLOO
from benchmarks.groups import DTORCH, THREADED
from benchmarks.processes import EMPTY, MEMCPY, PUBLISH, SIZES, STEPS, named
from benchmarks.report import Goal, Measured
from benchmarks.timing import Series

RANKS = 2
LARGE = 64 * 2**20
ON_CUDA = 256 * 2**20, 0.6e-3
"""all_reduce of so many bytes by two ranks of one H200 takes at most so many seconds."""


OF_PROCESSES = {"all_reduce": 4.0, "all_gather": 5.5, "reduce_scatter": 6.0, "all_to_all": 1.8}
"""How many times as fast as Gloo collectives of 64 MiB by two process ranks are."""


def of_all(measured: Measured) -> Iterator[Goal]:
    """Those goals of which the measurements were made."""
    yield from of_collectives(measured.collectives)
    yield from of_exchange(measured.exchange)
    yield from of_processes(measured.of_processes)
    if measured.between_processes is not None:
        yield from between_processes(measured.between_processes)


def of_collectives(results: Mapping[Cell, Series]) -> Iterator[Goal]:
    """Those goals whose cells and peers were measured."""
    for cell, series in results.items():
        if cell.ranks != RANKS:
            continue

        if cell.device != "cpu":
            if (cell.operation, cell.nbytes) == ("all_reduce", ON_CUDA[0]):
                text = "all_reduce, 256 MiB, one GPU: milliseconds"
                yield Goal(text, series.seconds(DTORCH) * 1e3, at_most=ON_CUDA[1] * 1e3)

            continue

        if cell.nbytes == LARGE:
            yield from _of_large(cell.operation, series)
        elif cell.small:
            least = 1.5 if cell.operation == "barrier" else 1.3
            what = f"{cell.operation}, {size(cell.nbytes)}" if cell.nbytes else cell.operation
            yield Goal(f"{what}: times as fast as {THREADED}", series.ratio(THREADED, DTORCH), least)


def _of_large(operation: str, series: Series) -> Iterator[Goal]:
    speedup = series.ratio(THREADED, DTORCH)
    text = f"{operation}, 64 MiB: times as fast as"
    if operation == "all_reduce":
        if GLOO in series:
            yield Goal(f"{text} {GLOO}", series.ratio(GLOO, DTORCH), at_least=5.5)

        yield Goal(f"{text} {THREADED}", speedup, at_least=8)
        yield Goal(f"{operation}, 64 MiB: times the blocked floor", series.ratio(DTORCH, FLOOR), at_most=1.6)
    elif operation in ("all_gather", "reduce_scatter"):
        yield Goal(f"{text} {THREADED}", speedup, at_least=1)
    elif operation == "all_to_all":
        yield Goal(f"{text} {THREADED}", speedup, at_least=0.9)


def of_exchange(results: Mapping[int, Series]) -> Iterator[Goal]:
    """The exchange is two wake-ups and little else, whatever the size and whoever else waits."""
    steps, crowded = "four steps", f"four steps, {CROWD} waiting"
    for nbytes, series in results.items():
        text = f"exchange, {size(nbytes)}"
        yield Goal(f"{text}: times a bare hand-off there and back", series.ratio(steps, HAND_OFF), at_most=1.4)
        yield Goal(f"{text}: times as long with {CROWD} other waits", series.ratio(crowded, steps), at_most=1.3)


def of_processes(results: Mapping[Cell, Series]) -> Iterator[Goal]:
    """Collectives of process ranks beside Gloo's."""
    for cell, series in results.items():
        least = OF_PROCESSES.get(cell.operation) if cell.nbytes == LARGE else 3.5 if cell.small else None
        if least is not None:
            what = f"{cell.operation}, {size(cell.nbytes)}" if cell.nbytes else cell.operation
            yield Goal(f"{what}, processes: times as fast as {GLOO}", series.ratio(GLOO, DTORCH), least)


def between_processes(series: Series) -> Iterator[Goal]:
    """The four steps between processes beside a queue; what publishing costs."""
    for nbytes, least in zip(SIZES, (5, 8), strict=True):
        speedup = series.ratio(named(QUEUE, nbytes), named(STEPS, nbytes))
        yield Goal(f"{named(STEPS, nbytes)}, processes: times as fast as {QUEUE}", speedup, least)

    small, large = SIZES
    copies = series.ratio(named(PUBLISH, large), named(MEMCPY, large))
    yield Goal(f"{named(PUBLISH, large)}, processes: times a {MEMCPY}", copies, at_most=1.7)
    same = series.ratio(named(f"{PUBLISH} {EMPTY}", large), named(PUBLISH, small))
    yield Goal(f"{named(f'{PUBLISH} {EMPTY}', large)}, processes: times that of 1 KiB", same, at_most=1.5)
