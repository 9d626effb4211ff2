"""Results as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dtorch_core.bench import collectives, exchange
from dtorch_core.bench.report import Fitted, Goal, Limits, Measured
from dtorch_core.bench.timing import Series


def facts(
    about: Mapping[str, str],
    measured: Measured,
    fitted: Sequence[Fitted],
    goals: Sequence[Goal],
    skipped: Sequence[str],
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
                "queued": cell.queued,
                "subjects": _subjects(series, collectives.limits),
            }
            for cell, series in measured.collectives.items()
        ],
        "lines": [
            {
                "operation": one.operation,
                "ranks": one.ranks,
                "device": one.device,
                "subject": one.subject,
                "fixed_seconds": one.line.fixed,
                "bytes_per_second": None if math.isinf(one.line.bandwidth) else one.line.bandwidth,
            }
            for one in fitted
        ],
        "exchange": _by_size(measured.exchange, exchange.limits),
        "exchange on a gpu": _by_size(measured.gpu_exchange, lambda name, series: ()),
        "all_reduce, a gpu each": [
            {**of._asdict(), "subjects": _subjects(series, lambda name, series: ())}
            for of, series in measured.own_gpus.items()
        ],
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
        "skipped": list(skipped),
    }


def _by_size(results: Mapping[int, Series], limits: Limits) -> list[dict[str, Any]]:
    return [{"bytes": nbytes, "subjects": _subjects(series, limits)} for nbytes, series in results.items()]


def _subjects(series: Series, limits: Limits) -> dict[str, Any]:
    return {name: _subject(name, series, limits(name, series)) for name in series.rounds}


def _subject(name: str, series: Series, of: Sequence[str]) -> dict[str, Any]:
    return {
        "median_seconds": series.seconds(name),
        "limits": list(of),
        "fraction_of_limit": series.fraction(name, of) if of else None,
        "rounds": list(series.rounds[name]),
    }
