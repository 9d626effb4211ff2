"""Results as tables for people."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import NamedTuple

import torch

from dtorch_core._text import count
from dtorch_core.bench import collectives, exchange
from dtorch_core.bench.cells import Cell
from dtorch_core.bench.fit import Line, fit
from dtorch_core.bench.sizes import GIB, size
from dtorch_core.bench.timing import Series

Limits = Callable[[str, Series], Sequence[str]]


class OwnGpus(NamedTuple):
    """A line of the table of ranks that have a GPU each."""

    ranks: int
    ranks_as: str
    nbytes: int


@dataclass(slots=True)
class Measured:
    """What one run has measured; what was not asked for is empty."""

    collectives: Mapping[Cell, Series] = field(default_factory=dict)
    exchange: Mapping[int, Series] = field(default_factory=dict)
    """The four steps of a tensor on the CPU, by its bytes."""
    gpu_exchange: Mapping[int, Series] = field(default_factory=dict)
    """The four steps of a tensor on a GPU, between processes."""
    own_gpus: Mapping[OwnGpus, Series] = field(default_factory=dict)
    """all_reduce of ranks that have a GPU each."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound and what was measured."""

    text: str
    measured: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def held(self) -> bool:
        return (self.at_least is None or self.measured >= self.at_least) and (
            self.at_most is None or self.measured <= self.at_most
        )


@dataclass(frozen=True, slots=True)
class Fitted:
    """What the sizes of one operation and subject come to."""

    operation: str
    ranks: int
    device: str
    subject: str
    line: Line


def setting(device: str) -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "dtorch": version("dtorch-core"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
        "cores": str(len(os.sched_getaffinity(0))),
    }


def lines(results: Mapping[Cell, Series]) -> Iterator[Fitted]:
    """A line for each operation and subject that was measured with more than one size, the floors' too."""
    times: dict[tuple[str, int, str, str], dict[int, float]] = {}
    for cell, series in results.items():
        for name in series.rounds:
            if cell.nbytes and not cell.queued and name not in collectives.NO_BYTES:
                key = cell.operation, cell.ranks, cell.device, name
                times.setdefault(key, {})[cell.nbytes] = series.seconds(name)

    for key, of_sizes in times.items():
        if len(of_sizes) > 1:
            yield Fitted(*key, fit(of_sizes))


def tables(measured: Measured) -> Iterator[Iterable[str]]:
    """Those that were measured, as lines of text."""
    for ranks in dict.fromkeys(cell.ranks for cell in measured.collectives):
        results = {cell: series for cell, series in measured.collectives.items() if cell.ranks == ranks}
        rows = {(cell.operation, cell.words if cell.nbytes else "-"): each for cell, each in results.items()}
        yield _table((count(ranks, "rank"), "size"), rows, collectives.limits)
        if fitted := list(lines(results)):
            yield _lines_table(ranks, fitted)

    if measured.exchange:
        yield _exchange_table("exchange", measured.exchange, exchange.limits)

    if measured.own_gpus:
        rows = {(f"{of.ranks} {of.ranks_as}", size(of.nbytes)): each for of, each in measured.own_gpus.items()}
        yield _table(("all_reduce, a GPU each", "size"), rows, lambda name, series: ())

    if measured.gpu_exchange:
        yield _exchange_table("exchange, one GPU, processes", measured.gpu_exchange, lambda name, series: ())


def _table(head: tuple[str, str], rows: Mapping[tuple[str, str], Series], limits: Limits) -> Iterator[str]:
    """A column for each subject, and beside it the part of its time that the limit takes."""
    names = list(dict.fromkeys(name for series in rows.values() for name in series.rounds))
    limited = [name for name in names if any(limits(name, series) for series in rows.values())]
    cells = [[*head, *[part for name in names for part in ([name, "of limit"] if name in limited else [name])]]]
    for place, series in rows.items():
        line = [*place]
        for name in names:
            line.append(time(series.seconds(name)) if name in series else "-")
            if name in limited:
                line.append(_fraction(name, series, limits))

        cells.append(line)

    return grid(cells, 2)


def _exchange_table(title: str, results: Mapping[int, Series], limits: Limits) -> Iterator[str]:
    """A line for each subject and size: there are many subjects."""
    cells = [[title, "size", "time", "of limit"]]
    for nbytes, series in results.items():
        for name in series.rounds:
            cells.append([name, size(nbytes), time(series.seconds(name)), _fraction(name, series, limits)])

    return grid(cells, 1)


def _lines_table(ranks: int, fitted: Sequence[Fitted]) -> Iterator[str]:
    cells = [[f"{count(ranks, 'rank')}: time = fixed cost + bytes / bandwidth", "subject", "fixed cost", "bandwidth"]]
    for one in fitted:
        speed = "-" if math.isinf(one.line.bandwidth) else f"{one.line.bandwidth / GIB:.2f} GiB/s"
        cells.append([one.operation, one.subject, f"{one.line.fixed * 1e6:.1f} us", speed])

    yield from grid(cells, 2)
    if any(math.isinf(one.line.bandwidth) for one in fitted):
        yield "bandwidth -: the larger sizes took no longer"


def goals_table(goals: Sequence[Goal]) -> Iterator[str]:
    """Lines: what was to hold, what was measured."""
    cells = [["goal", "bound", "measured", ""]]
    for goal in goals:
        bound = f">= {goal.at_least:g}" if goal.at_least is not None else f"<= {goal.at_most:g}"
        cells.append([goal.text, bound, f"{goal.measured:.2f}", "held" if goal.held else "MISSED"])

    return grid(cells, 1)


def time(seconds: float) -> str:
    """``52.8 us``, ``1.76 ms``, ``1.66 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"

    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _fraction(name: str, series: Series, limits: Limits) -> str:
    of = limits(name, series) if name in series else ()
    return f"{series.fraction(name, of):.2f}" if of else "-"


def grid(rows: Sequence[Sequence[str]], words: int) -> Iterator[str]:
    """Lines; the first ``words`` columns are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if number < words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
