"""Results as tables, and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.cells import Cell, size
from benchmarks.floors import FLOOR, HAND_OFF
from benchmarks.gloo import GLOO
from benchmarks.goals import Goal
from benchmarks.groups import DTORCH, THREADED
from benchmarks.timing import Series


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


def collectives_table(results: Mapping[Cell, Series]) -> Iterator[str]:
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


def exchange_table(results: Mapping[int, Series]) -> Iterator[str]:
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


def to_dict(
    about: Mapping[str, str], collectives: Mapping[Cell, Series], exchange: Mapping[int, Series], goals: Sequence[Goal]
) -> dict[str, Any]:
    """Everything, with the seconds of each round."""
    return {
        "setting": dict(about),
        "collectives": [
            {
                "operation": cell.operation,
                "bytes": cell.nbytes,
                "ranks": cell.ranks,
                "device": cell.device,
                **_series(series, DTORCH),
            }
            for cell, series in collectives.items()
        ],
        "exchange": [{"bytes": nbytes, **_series(series, HAND_OFF)} for nbytes, series in exchange.items()],
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

