"""Where the time of one small collective goes: microseconds of each step, for the rank that waits and the last to come.

Two ranks call it again and again. The functions that take its steps (:mod:`dtorch_core.bench.steps`) look at the clock
as they begin and end. A step's time is its own: without the steps within it, and without what the looking costs, which
is measured on a function that does nothing. Bursts without the stopwatch are measured by turns with those with it.
"""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from time import perf_counter
from typing import Any

import dtorch_core
from dtorch_core.bench.cells import Buffers, Cell, call
from dtorch_core.bench.report import grid
from dtorch_core.bench.steps import CALL, POST, SIGNAL, SLEEP, STEPS, TURN, WAKE_UP
from dtorch_core.bench.stopwatch import Cost, Span, Stopwatch, cost
from dtorch_core.bench.team import pin

RANKS = 2
BURST, WARM_UP = 150, 50
"""Calls in a row; and those before the first burst."""


@dataclass(slots=True)
class Told:
    """What one rank has measured."""

    bare: Sequence[float]
    """Seconds of a call in each burst without the stopwatch."""
    watched: Sequence[float]
    """The same with it."""
    spans: Sequence[Span]
    cost: Cost
    absent: Sequence[str]


@dataclass(slots=True)
class Call:
    """One rank's side of one call."""

    steps: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Nanoseconds."""
    posted: int = 0
    signalled: int | None = None
    sleeps: list[Span] = field(default_factory=list)
    spans: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One step in microseconds; None for a side that does not take it."""

    step: str
    waits: float | None
    last: float | None


@dataclass(frozen=True, slots=True)
class Profile:
    """The table, and how far it is to be believed."""

    cell: Cell
    ranks_as: str
    rows: Sequence[Row]
    bare: float
    """Microseconds of a call, one after the other, as it is."""
    watched: float
    """The same under the stopwatch."""
    spans: float
    """Looks at the clock in a call of one rank, in pairs."""
    cost: Cost
    absent: Sequence[str]
    """Functions that the loaded backends do not have: their time is in the steps around them."""

    @property
    def sides(self) -> Sequence[Sequence[float | None]]:
        """The columns of the table."""
        return [row.waits for row in self.rows], [row.last for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def profile(operation: str, nbytes: int, device: str, ranks_as: str, rounds: int) -> Profile:
    """Measure one collective of two ranks."""
    cell = Cell(operation, 0 if operation == "barrier" else nbytes, RANKS, device)
    # Threads share the stopwatch, processes get one each.
    arguments = cell, Stopwatch(STEPS), ranks_as == "threads", rounds
    told: list[Told] = dtorch_core.spawn(
        _measure, RANKS, args=arguments, ranks_as=ranks_as, devices=device, timeout=300
    )
    of_ranks = [calls_of(each.spans, each.cost) for each in told]
    return Profile(
        cell,
        ranks_as,
        rows(of_ranks),
        max(median(each.bare) for each in told) * 1e6,
        max(median(each.watched) for each in told) * 1e6,
        fmean(one.spans for calls in of_ranks for one in calls),
        told[0].cost,
        told[0].absent,
    )


def _measure(ctx: dtorch_core.RankContext, cell: Cell, watch: Stopwatch, shared: bool, rounds: int) -> Told:
    pin(ctx.rank)
    starts = not shared or ctx.rank == 0
    bare, watched = [], []
    group = ctx.open_group("profile")
    assert group is not None, "no rank is left out"
    with group:
        act = call(cell, group.process_group, Buffers.of(cell, ctx.rank))
        timed = watch.wrapped(CALL, act)
        for _ in range(WARM_UP):
            act()

        if starts:
            gc.disable()  # spans are many, and no garbage

        try:
            for _ in range(rounds):
                bare.append(_burst(act))
                group.barrier()
                if starts:
                    watch.start()

                group.barrier()
                watched.append(_burst(timed))
                group.barrier()
                if starts:
                    watch.stop()

                group.barrier()
        finally:
            if starts:
                watch.stop()
                gc.enable()

        group.barrier()

    own = cost() if starts else Cost(0, 0)  # the others sleep, or wait for their process to end
    return Told(bare, watched, watch.taken(threading.get_ident()), own, watch.absent)


def _burst(act: Callable[[], object]) -> float:
    begin = perf_counter()
    for _ in range(BURST):
        act()

    return (perf_counter() - begin) / BURST


def calls_of(spans: Sequence[Span], cost: Cost) -> list[Call]:
    """One rank's side of each call, from the spans of one thread. What is outside of calls is left out."""
    calls: list[Call] = []
    open_spans: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while open_spans and open_spans[-1].end <= span.begin:
            open_spans.pop()

        if span.step == CALL:
            calls.append(Call())
        elif not open_spans:
            continue

        one = calls[-1]
        taken = span.end - span.begin
        one.steps[span.step] += taken - cost.within
        if open_spans:
            one.steps[open_spans[-1].step] -= taken - cost.within + cost.whole

        open_spans.append(span)
        one.spans += 1
        if span.step == POST:
            one.posted = span.begin
        elif span.step == SIGNAL and one.signalled is None:
            one.signalled = span.begin
        elif span.step == SLEEP:
            one.sleeps.append(span)

    return calls


def rows(of_ranks: Sequence[Sequence[Call]]) -> list[Row]:
    """The table: of each side, the mean of those calls whose time lies in the middle half."""
    waits: list[dict[str, float]] = []
    last: list[dict[str, float]] = []
    for sides in zip(*of_ranks, strict=True):
        first, second = sorted(sides, key=lambda side: side.posted)
        waits.append(_with_sleep(first, second.signalled))
        last.append(_with_sleep(second, first.signalled))

    mean_of_waits, mean_of_last = _means(waits), _means(last)
    order = dict.fromkeys([CALL, *[step for step, _ in STEPS], TURN, WAKE_UP])
    taken = [step for step in order if step in mean_of_waits or step in mean_of_last]
    return [Row(step, mean_of_waits.get(step), mean_of_last.get(step)) for step in taken]


def _with_sleep(side: Call, signalled: int | None) -> dict[str, float]:
    """The steps, with the sleep in two parts: until the other rank's signal began, and from then on."""
    steps = dict(side.steps)
    asleep = steps.pop(SLEEP, 0.0)
    if side.sleeps:
        turn = sum(max(0, min(signalled, span.end) - span.begin) for span in side.sleeps) if signalled else asleep
        turn = min(turn, asleep)
        steps[TURN], steps[WAKE_UP] = turn, asleep - turn

    return steps


def _means(sides: Sequence[dict[str, float]]) -> dict[str, float]:
    """Microseconds of each step."""
    ordered = sorted(sides, key=lambda steps: sum(steps.values()))
    middle = ordered[len(ordered) // 4 : max(1, len(ordered) * 3 // 4)]
    names = dict.fromkeys(name for steps in middle for name in steps)
    return {name: fmean(steps.get(name, 0.0) for steps in middle) / 1e3 for name in names}


def text(found: Profile) -> Iterator[str]:
    """The table for people."""
    cell = found.cell
    yield f"{cell} as {found.ranks_as}, on {cell.device}: microseconds of each step"
    cells = [["step", "who waits", "last to come"]]
    for row in found.rows:
        cells.append([row.step, *["-" if side is None else f"{side:.1f}" for side in (row.waits, row.last)]])

    sums = [sum(side or 0.0 for side in sides) for sides in found.sides]
    cells.append(["sum", *[f"{each:.1f}" for each in sums]])
    yield from grid(cells, 1)
    yield f"one call after the other: {found.bare:.1f} us; under the stopwatch: {found.watched:.1f} us"
    yield (
        f"the stopwatch: {found.spans:.0f} times a call and rank, {found.cost.whole / 1e3:.2f} us each, "
        f"{found.cost.within / 1e3:.2f} us of it within the step; none of it is in the table"
    )
    if found.absent:
        yield f"not found, and so part of the steps around them: {', '.join(found.absent)}"
