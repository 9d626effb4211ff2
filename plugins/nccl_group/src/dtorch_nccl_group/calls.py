"""What this rank called last, and what the others say when they are asked."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dtorch_core._text import rank_list, seconds

ANSWER = 1.0
"""Seconds that the other ranks may take to answer."""


class Calls:
    """Counts the collectives of one rank's handle."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self.number = 0
        """Of the last collective."""
        self.launched = 0
        """Of the last one that has been begun on the group."""
        self._last = ("nothing", time.monotonic())
        self._questions = itertools.count(1)
        self._asked: dict[int, dict[int, dict[str, Any]]] = {}
        self._condition = threading.Condition()
        self._awaited = 0
        self._ended = False

    def begin(self, call: str, *, collective: bool) -> int:
        """Count a call; its number."""
        if collective:
            self.number += 1

        self._last = call, time.monotonic()
        return self.number

    def has_launched(self, number: int) -> None:
        """A collective has been begun on the group."""
        self.launched = number
        if self._awaited:
            with self._condition:
                self._condition.notify_all()

    def wait_launched(self, number: int, timeout: float) -> None:
        """Until this rank has begun collective ``number``, or never will, or is out of time."""
        with self._condition:
            self._awaited += 1
            self._condition.wait_for(lambda: self._ended or self.launched >= number, timeout)
            self._awaited -= 1

    def end(self) -> None:
        """Nothing will be begun any more."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def said(self) -> dict[str, Any]:
        """The last call, for those who ask."""
        call, begun = self._last
        return {"number": self.number, "call": call, "ago": time.monotonic() - begun}

    def own(self) -> str:
        """The last call, for people."""
        return _line(self._rank, self.said())

    def ask(self, ranks: Sequence[int]) -> int:
        """Begin a question to some ranks; its number."""
        question = next(self._questions)
        with self._condition:
            self._asked[question] = dict.fromkeys(ranks, {})

        return question

    def answered(self, rank: int, words: dict[str, Any]) -> None:
        """A rank has answered."""
        with self._condition:
            if rank in self._asked.get(words["told"], ()):
                self._asked[words["told"]][rank] = words
                self._condition.notify_all()

    def table(self, question: int, left: Mapping[int, int]) -> str:
        """Who called what last; those are late that have called less than this rank. Waits for the answers."""
        with self._condition:
            self._condition.wait_for(lambda: all(self._asked[question].values()), ANSWER)
            answers = self._asked.pop(question)

        own = self.said()
        lines, late = [], []
        for rank in range(self._world_size):
            if rank == self._rank:
                lines.append(_line(rank, own))
            elif rank in left:
                lines.append(f"rank {rank}: it has left, after call #{left[rank]}")
            elif not (answer := answers.get(rank)):
                lines.append(f"rank {rank}: no answer")
                late.append(rank)
            else:
                lines.append(_line(rank, answer))
                if answer["number"] < own["number"]:
                    late.append(rank)

        head = f"last calls (late: {rank_list(late)}):" if late else "last calls:"
        return "\n  ".join([head, *lines])


def _line(rank: int, said: dict[str, Any]) -> str:
    return f"rank {rank}: #{said['number']} {said['call']}, {seconds(said['ago'])} ago"
