"""Waits that wake one thread, the one meant."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Waiter:
    """One blocked thread of one rank: asleep on a lock of its own, so that nobody else's wake-up disturbs it."""

    __slots__ = ("_lock", "done", "error", "rank", "result")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.done = False
        """What was waited for has come. Written under the session's mutex."""
        self.result: Any = None
        """What comes with ``done``."""
        self.error: Callable[[], Exception] | None = None
        """Why it never will. Written under the session's mutex; makes a fresh error for this thread."""
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def settled(self) -> bool:
        """There is an outcome: wake it, and leave it alone from now on."""
        return self.done or self.error is not None

    def wake(self) -> None:
        """Let the thread go on; called once, after ``done`` or ``error`` was set, outside the mutex."""
        self._lock.release()

    def sleep(self, timeout: float) -> None:
        """Block until woken, or for ``timeout`` seconds."""
        self._lock.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX)))


class Gate:
    """A barrier: opens when all ranks stand before it; a rank that gives up can come back."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self._world_size = world_size
        self.waiters: dict[int, Waiter] = {}

    def missing(self) -> list[int]:
        """The ranks that are not here."""
        return [rank for rank in range(self._world_size) if rank not in self.waiters]

    def arrive(self, rank: int) -> Waiter:
        """Stand before the gate. The last one finds its waiter done already."""
        waiter = self.waiters[rank] = Waiter(rank)
        waiter.done = not self.missing()
        return waiter

    def turn_away(self) -> None:
        """Those that have failed no longer stand here: a rank can come back before its thread has woken."""
        self.waiters = {rank: waiter for rank, waiter in self.waiters.items() if waiter.error is None}

    def open(self) -> list[Waiter]:
        """Let everybody through: the waiters to wake."""
        waiters = list(self.waiters.values())
        self.waiters.clear()
        for waiter in waiters:
            waiter.done = True

        return waiters
