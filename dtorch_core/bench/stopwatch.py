"""Stops the time of functions, from outside: they are wrapped while it runs, and what the wrapping costs is known."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One call of a function: times in nanoseconds, of a clock that all processes of a machine share."""

    thread: int
    step: str
    begin: int
    end: int


class Cost(NamedTuple):
    """What a wrapper adds to a call, in nanoseconds."""

    within: float
    """To the time between its two looks at the clock."""
    whole: float
    """To the time of whoever calls."""


class Stopwatch:
    """Wraps functions by their names. They may be called from any thread; start and stop it while none is."""

    def __init__(self, steps: Iterable[tuple[str, str]]) -> None:
        """
        :param steps: pairs of a name for a step, and of a function: ``"module:name"`` or ``"module:Class.name"``.
        """
        self._steps = list(steps)
        self._spans: list[tuple[int, str, int, int]] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self.absent: list[str] = []
        """Functions that modules which are loaded do not have."""

    def start(self) -> None:
        """Wrap what is loaded; nothing is imported for it."""
        self.absent = []
        for step, path in self._steps:
            module, _, name = path.partition(":")
            owner: Any = sys.modules.get(module)
            if owner is None:
                continue

            *classes, name = name.split(".")
            for each in classes:
                owner = getattr(owner, each, None)

            if owner is None or name not in vars(owner):
                self.absent.append(path)
                continue

            inner = vars(owner)[name]
            self._undo.append((owner, name, inner))
            setattr(owner, name, self.wrapped(step, inner))

    def stop(self) -> None:
        """Leave everything as it was."""
        while self._undo:
            owner, name, inner = self._undo.pop()
            setattr(owner, name, inner)

    def taken(self, thread: int) -> list[Span]:
        """What was measured on one thread."""
        return [Span(*each) for each in list(self._spans) if each[0] == thread]

    def wrapped(self, step: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A function that stops its time."""
        add, clock, ident = self._spans.append, perf_counter_ns, get_ident

        @functools.wraps(inner)
        def timed(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - as of any function
            begin = clock()
            try:
                return inner(*args, **named)
            finally:
                add((ident(), step, begin, clock()))

        return timed


def cost(calls: int = 2000, batches: int = 15) -> Cost:
    """Measure what a wrapper costs, on a function that does nothing: medians of batches."""
    watch = Stopwatch(())
    wrapped = watch.wrapped("nothing", _nothing)
    bare, whole, within = [], [], []
    for _ in range(batches):
        bare.append(_time(_nothing, calls))
        whole.append(_time(wrapped, calls))
        within.append(median(end - begin for _, _, begin, end in watch._spans[-calls:]))

    return Cost(max(0.0, median(within) - median(bare)), max(0.0, median(whole) - median(bare)))


def _nothing(first: object, second: object) -> None:
    return


def _time(call: Callable[..., object], calls: int) -> float:
    numbers: Sequence[int] = range(calls)
    begin = perf_counter_ns()
    for number in numbers:
        call(number, begin)

    return (perf_counter_ns() - begin) / calls
