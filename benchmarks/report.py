"""Results as tables, and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.cells import Cell, size
from benchmarks.floors import FLOOR, HAND_OFF
from benchmarks.gloo import GLOO
from benchmarks.groups import DTORCH, THREADED
from benchmarks.processes import MEMCPY, SIZES, SOCKET, named
from benchmarks.timing import Series


@dataclass(slots=True)
class Measured:
    """The tables of one run; those that were not asked for are empty."""

    collectives: Mapping[Cell, Series] = field(default_factory=dict)
    exchange: Mapping[int, Series] = field(default_factory=dict)
    of_processes: Mapping[Cell, Series] = field(default_factory=dict)
    """Collectives of process ranks."""
    between_processes: Series | None = None
    """The four steps between process ranks."""


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


def tables(measured: Measured) -> Iterator[Iterable[str]]:
    """Those that were measured, as lines."""
    if measured.collectives:
        yield _collectives_table(measured.collectives)

    if measured.exchange:
        yield _exchange_table(measured.exchange)

    if measured.of_processes:
        yield _processes_table(measured.of_processes)

    if measured.between_processes is not None:
        yield _between_table(measured.between_processes)


def _collectives_table(results: Mapping[Cell, Series]) -> Iterator[str]:
    """Lines; the peers' columns say how often as long they took."""
    yield f"{'collective':15} {'ranks':>5} {'size':>8}  {'dtorch':>9}   {THREADED:>22} {GLOO:>22}   of the limit"
    for cell, series in results.items():
        limit = HAND_OFF if HAND_OFF in series else FLOOR
        peers = " ".join(f"{_peer(series, name):>22}" for name in (THREADED, GLOO))
        line = f"{cell.operation:15} {cell.ranks:>5} {size(cell.nbytes) if cell.nbytes else '-':>8}"
        yield (
            f"{line}  {_time(series.seconds(DTORCH)):>9}   {peers}"
            f"   {series.ratio(DTORCH, limit):.2f} x {limit} {_time(series.seconds(limit))}"
        )


def _processes_table(results: Mapping[Cell, Series]) -> Iterator[str]:
    yield f"{'processes':15} {'ranks':>5} {'size':>8}  {'dtorch':>9}   {GLOO:>22}"
    for cell, series in results.items():
        line = f"{cell.operation:15} {cell.ranks:>5} {size(cell.nbytes) if cell.nbytes else '-':>8}"
        yield f"{line}  {_time(series.seconds(DTORCH)):>9}   {_peer(series, GLOO):>22}"


def _between_table(series: Series) -> Iterator[str]:
    bases = {size(small): named(SOCKET, small) for small in SIZES[:1]}
    bases |= {size(large): named(MEMCPY, large) for large in SIZES[1:]}
    yield f"{'exchange between processes':34}  {'time':>9}   of its limit"
    for name in series.rounds:
        base = bases[name.rpartition(", ")[2]]
        yield f"{name:34}  {_time(series.seconds(name)):>9}   {series.ratio(name, base):.2f} x {base}"


def _exchange_table(results: Mapping[int, Series]) -> Iterator[str]:
    """Lines, one for each size and subject."""
    yield f"{'exchange':26} {'size':>8}  {'time':>9}   of a hand-off there and back"
    for nbytes, series in results.items():
        for name in series.rounds:
            ratio = series.ratio(name, HAND_OFF)
            yield f"{name:26} {size(nbytes):>8}  {_time(series.seconds(name)):>9}   {ratio:.2f}"


def goals_table(goals: Sequence[Goal]) -> Iterator[str]:
    """Lines: what was to hold, what was measured."""
    yield f"{'goal':66} {'bound':>9} {'measured':>9}"
    for goal in goals:
        bound = f">= {goal.at_least:g}" if goal.at_least is not None else f"<= {goal.at_most:g}"
        yield f"{goal.text:66} {bound:>9} {goal.measured:>9.2f}  {'held' if goal.held else 'MISSED'}"


def to_dict(about: Mapping[str, str], measured: Measured, goals: Sequence[Goal]) -> dict[str, Any]:
    """Everything, with the seconds of each round."""
    return {
        "setting": dict(about),
        "collectives": _cells(measured.collectives),
        "exchange": [{"bytes": nbytes, **_series(series, HAND_OFF)} for nbytes, series in measured.exchange.items()],
        "collectives of processes": _cells(measured.of_processes),
        "exchange between processes": (
            None
            if measured.between_processes is None
            else _series(measured.between_processes, named(SOCKET, SIZES[0]))
        ),
        "goals": [
            {
                "goal": goal.text,
                "at_least": goal.at_least,
                "at_most": goal.at_most,
                "measured": goal.measured,
                "held": goal.held,
            }
            for goal in goals
        ],
    }


def _cells(results: Mapping[Cell, Series]) -> list[dict[str, Any]]:
    return [
        {
            "operation": cell.operation,
            "bytes": cell.nbytes,
            "ranks": cell.ranks,
            "device": cell.device,
            **_series(series, DTORCH),
        }
        for cell, series in results.items()
    ]


def _series(series: Series, base: str) -> dict[str, Any]:
    return {
        "median_seconds": {name: series.seconds(name) for name in series.rounds},
        f"ratio_to_{base}": {name: series.ratio(name, base) for name in series.rounds},
        "rounds": {name: list(seconds) for name, seconds in series.rounds.items()},
    }


def _peer(series: Series, name: str) -> str:
    return f"{_time(series.seconds(name))} ({series.ratio(name, DTORCH):.2f} x)" if name in series else "-"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"

