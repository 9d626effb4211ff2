"""Measures by turns: every subject once a round, so that drift of the machine hits all alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

BURST = 0.03
"""Seconds that one measurement of a subject takes, about."""
MOST_CALLS = 600


class Subject(Protocol):
    """Something whose calls can be timed."""

    @property
    def name(self) -> str:
        """What the tables call it."""

    def time(self, count: int) -> float:
        """Seconds for one call, from ``count`` calls in a row."""


@dataclass(frozen=True, slots=True)
class Series:
    """What was measured, by subject: seconds of each round."""

    rounds: Mapping[str, Sequence[float]]

    def seconds(self, name: str) -> float:
        """The median of a subject's rounds."""
        return median(self.rounds[name])

    def ratio(self, name: str, to: str) -> float:
        """How often ``to``'s time goes into ``name``'s: the median of the rounds' ratios."""
        return median(a / b for a, b in zip(self.rounds[name], self.rounds[to], strict=True))

    def fraction(self, name: str, of: Sequence[str]) -> float:
        """How much of ``name``'s time the longest of the subjects ``of`` takes: the median of the rounds'."""
        limits: list[float] = [max(each) for each in zip(*[self.rounds[limit] for limit in of], strict=True)]
        return median(limit / seconds for limit, seconds in zip(limits, self.rounds[name], strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self.rounds


def interleave(subjects: Sequence[Subject], rounds: int) -> Series:
    """Measure all subjects ``rounds`` times, by turns, each turn beginning with another one."""
    counts = {subject.name: _calls_in_a_burst(subject) for subject in subjects}
    times: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(rounds):
        first = number % len(subjects)
        for subject in [*subjects[first:], *subjects[:first]]:
            times[subject.name].append(subject.time(counts[subject.name]))

    return Series(times)


def _calls_in_a_burst(subject: Subject) -> int:
    if subject.time(1) > BURST:
        return 1

    return max(1, min(MOST_CALLS, int(BURST / subject.time(2))))
