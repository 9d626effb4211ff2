"""Who of an opening's ranks has left, and how; and what a wait raises because of it.

One mutex guards what the ranks of an opening share, for a few microseconds at a time: no thread sleeps, calls torch or
wakes another one under it. What is not said to take the mutex is called under it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from dtorch_core._text import rank_list
from dtorch_core.errors import AbortedError, PeerLostError
from dtorch_memory_store.waiting import Failure


class Presence:
    """The ranks of one opening."""

    def __init__(self, label: str, world_size: int) -> None:
        self.label = label
        """How messages call the opening: the store, or the group that it is for."""
        self.world_size = world_size
        self.mutex = threading.Lock()
        self.closed: set[int] = set()
        self.died: dict[int, str] = {}
        """Ranks that failed, and how."""
        self.aborted: str | None = None
        """Why everything was ended."""
        self.complete = True
        """Nobody has left: a quick answer for those who would ask why not."""

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
        """A rank has failed."""
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
        # A death first: whoever ends the run because of it aborts the other ranks' handles as well.
        if self.died:
            dead, why = next(iter(self.died.items()))
            text = f"{self.me(rank)}, {what}: rank {dead} (pid {os.getpid()}) was lost: {why}; open {self.label} anew"
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
        text = (
            f"{self.me(rank)}, {what}: {rank_list(ranks)} (pid {os.getpid()}) {'has' if len(ranks) == 1 else 'have'} "
            f"left {self.label} (closed it or returned), so nobody can satisfy this wait any more"
        )
        return lambda: PeerLostError(text)
