"""Who of an opening's ranks has left, and what a wait raises because of it: one rule for all. For authors of backends.

One mutex guards what the ranks of a process share of an opening, for a few microseconds at a time: no thread sleeps,
calls torch or wakes another one under it. What is not said to take the mutex is called under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from dtorch_core._text import rank_list, seconds
from dtorch_core.errors import AbortedError, PeerLostError

Failure = Callable[[], Exception]
"""Makes the error of a wait that can't end well: a fresh one for each thread."""


class Wait:
    """One wait of one rank, and its outcome. How its thread sleeps and is woken is the backend's."""

    __slots__ = ("done", "error", "rank", "result")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.done = False
        """What was waited for has come. This and ``error`` are written once, under the mutex."""
        self.result: Any = None
        """What comes with ``done``."""
        self.error: Failure | None = None
        """Why it never will."""

    @property
    def settled(self) -> bool:
        """There is an outcome: wake it, and leave it alone from now on."""
        return self.done or self.error is not None


_Wait = TypeVar("_Wait", bound=Wait)


def settle(waits: Iterable[_Wait], failure_of: Callable[[_Wait], Failure | None]) -> list[_Wait]:
    """Fail those that have no outcome yet and for which there is a failure: those to wake. Under the mutex."""
    failed = []
    for wait in waits:
        failure = None if wait.settled else failure_of(wait)
        if failure is not None:
            wait.error = failure
            failed.append(wait)

    return failed


def raise_if(failure: Failure | None) -> None:
    """Raise a failure, if there is one."""
    if failure is not None:
        raise failure()


def not_all_came(missing: Collection[int], gave_up: Collection[int], timeout: float) -> str:
    """Who is to blame for a gate that stayed shut: ranks that have come and given up are not missing."""
    if not missing:
        return f"{rank_list(sorted(gave_up))} had come and gave up before all were there, within {seconds(timeout)}"

    return f"{rank_list(missing)} had not come after {seconds(timeout)}"


class Presence:
    """The ranks of one opening, as this process knows them."""

    def __init__(self, label: str, pids: Sequence[int]) -> None:
        """
        :param pids: each rank's process.
        """
        self.label = label
        """How messages call the opening: the store, or the group that it is for."""
        self.pids = pids
        self.world_size = len(pids)
        self.mutex = threading.Lock()
        self.closed: set[int] = set()
        self.died: dict[int, str] = {}
        """Ranks that failed, and how."""
        self.aborted: str | None = None
        """Why everything was ended."""
        self.complete = True
        """Nobody has left: a quick answer for those who would ask why not."""
        self.all_said = True
        """What was said before a rank died, or somebody ended everything, has arrived: what is not satisfied then never
        will be. Where words take time between ranks, the backend makes it false until they have."""

    def me(self, rank: int) -> str:
        """Begins a message about a rank."""
        return f"{self.label}, rank {rank}"

    def at(self, key: str) -> str:
        """Begins a message about a key."""
        return f"{self.label}, key {key!r}"

    def others(self, rank: int) -> set[int]:
        """Every rank but one."""
        return set(range(self.world_size)) - {rank}

    def leave(self, rank: int) -> None:
        """A rank has closed its handle."""
        self.closed.add(rank)
        self.complete = False

    def die(self, rank: int, reason: str) -> None:
        """A rank has failed; its first reason stays."""
        self.died.setdefault(rank, reason)
        self.complete = False

    def abort(self, reason: str) -> None:
        """Somebody ended everything; the first reason stays."""
        self.aborted = self.aborted or reason
        self.complete = False

    def check_open(self, rank: int) -> None:
        """:raises AbortedError: if the rank has closed its handle."""
        if rank in self.closed:
            raise AbortedError(f"{self.me(rank)}: it is closed; open it anew")

    def over(self, rank: int, what: str) -> Failure | None:
        """Why no wait of any kind can end well; None while it can."""
        return self.ended(rank, what) if self.all_said else None

    def ended(self, rank: int, what: str) -> Failure | None:
        """Why nothing can be begun any more; None while it can."""
        # A death first: whoever ends the run because of it aborts the other ranks' handles as well.
        if self.died:
            dead, why = next(iter(self.died.items()))
            text = (
                f"{self.me(rank)}, {what}: rank {dead} (pid {self.pids[dead]}) was lost: {why}; open {self.label} anew"
            )
            return lambda: PeerLostError(text)

        if self.aborted is not None:
            reason = f"{self.me(rank)}, {what}: {self.aborted}"
            return lambda: AbortedError(reason)

        return None

    def lacks(self, rank: int, needed: Iterable[int], what: str) -> Failure | None:
        """Why ``rank`` can't wait for something that every one of ``needed`` has to do; None if it can."""
        gone = [other for other in needed if other in self.closed]
        return self.over(rank, what) or (self.lost(rank, gone, what) if gone else None)

    def lost(self, rank: int, gone: Iterable[int], what: str) -> Failure:
        """The failure of a wait that ranks which closed their handles could have satisfied."""
        ranks = list(gone)
        # A goodbye that came before everybody knew of the death or the abort; or that of who left because of it.
        ended = self.ended(rank, what)
        if ended is not None:
            return ended

        # What ends a process without a goodbye is told in other words; what says one may still be an exit code.
        how = "closed it or returned"
        if any(self.pids[other] != self.pids[rank] for other in ranks):
            how = "closed it, returned, or its process ended"

        pids = ", ".join(str(pid) for pid in sorted({self.pids[other] for other in ranks}))
        text = (
            f"{self.me(rank)}, {what}: {rank_list(ranks)} (pid {pids}) {'has' if len(ranks) == 1 else 'have'} "
            f"left {self.label} ({how}), so nobody can satisfy this wait any more"
        )
        return lambda: PeerLostError(text)
