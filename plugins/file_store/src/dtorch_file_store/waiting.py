"""Blocked threads of this process, and how each is woken by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("dtorch")

Failure = Callable[[], Exception]
"""Makes the error of a wait that can't end well: a fresh one for each thread."""


class Waiter:
    """One blocked thread of one rank. ``done`` and ``error`` are written under the node's mutex, once."""

    __slots__ = ("_lock", "done", "error", "rank", "result", "signalled")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.done = False
        """What was waited for has come."""
        self.result: Any = None
        """What comes with ``done``."""
        self.error: Failure | None = None
        """Why it never will."""
        self.signalled = False
        """A wake-up is under way. Written under the mutex."""
        self._lock: threading.Lock | None = None  # made by the first sleep: a thread that reads sockets never sleeps

    @property
    def settled(self) -> bool:
        """There is an outcome: wake it, and leave it alone from now on."""
        return self.done or self.error is not None

    def prepare(self) -> None:
        """Before it may be woken from :meth:`sleep`. Under the mutex."""
        if self._lock is None:
            self._lock = threading.Lock()
            self._lock.acquire()

    def sleep(self, timeout: float) -> bool:
        """Block until woken, or for ``timeout`` seconds; false if that was it."""
        assert self._lock is not None, "prepared"
        return self._lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX) if timeout > 0 else 0)

    def consume(self) -> None:
        """Take a wake-up that came while the thread gave up; it is on its way."""
        assert self._lock is not None, "prepared"
        self._lock.acquire()

    def wake(self) -> None:
        """Let the sleeping thread go on; once for each time that it sleeps."""
        assert self._lock is not None, "prepared"
        self._lock.release()


class Notice(Waiter):
    """A callback in a waiter's place: it is called instead of woken."""

    __slots__ = ("_callback",)

    def __init__(self, rank: int, callback: Callable[[], None]) -> None:
        super().__init__(rank)
        self._callback = callback

    def call(self) -> None:
        """Tell that there is an outcome; outside the mutex."""
        try:
            self._callback()
        except Exception:  # of whoever asked for it: the waiters behind it have to be woken all the same
            log.exception("rank %d: a callback at the end of a wait failed", self.rank)


def settle(waiters: Iterable[Waiter], failure_of: Callable[[Waiter], Failure | None]) -> list[Waiter]:
    """Fail those that have no outcome yet and for which there is a failure: the waiters to wake. Under the mutex."""
    failed = []
    for waiter in waiters:
        failure = None if waiter.settled else failure_of(waiter)
        if failure is not None:
            waiter.error = failure
            failed.append(waiter)

    return failed


def raise_if(failure: Failure | None) -> None:
    """Raise a failure, if there is one."""
    if failure is not None:
        raise failure()
