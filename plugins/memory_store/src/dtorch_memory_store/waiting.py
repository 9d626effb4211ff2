"""Waits that wake one thread, the one meant."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("dtorch")

_LONGEST = threading.TIMEOUT_MAX
"""Seconds that a lock can be waited for."""

Failure = Callable[[], Exception]
"""Makes the error of a wait that can't end well: a fresh one for each thread."""


class Waiter:
    """One blocked thread of one rank: asleep on a lock of its own, so that nobody else's wake-up disturbs it."""

    __slots__ = ("_lock", "done", "error", "rank", "result")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.done = False
        """What was waited for has come. Written under the mutex."""
        self.result: Any = None
        """What comes with ``done``."""
        self.error: Failure | None = None
        """Why it never will. Written under the mutex; makes a fresh error for this thread."""
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
        self._lock.acquire(True, 0 if timeout <= 0 else timeout if timeout < _LONGEST else _LONGEST)


class Notice(Waiter):
    """A callback in a waiter's place: to wake it is to call it."""

    __slots__ = ("_callback",)

    def __init__(self, rank: int, callback: Callable[[], None]) -> None:
        self.rank, self.done, self.result, self.error = rank, False, None, None
        self._callback = callback

    def wake(self) -> None:
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


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake settled waiters; outside the mutex."""
    for waiter in waiters:
        waiter.wake()


def raise_if(failure: Failure | None) -> None:
    """Raise a failure, if there is one."""
    if failure is not None:
        raise failure()
