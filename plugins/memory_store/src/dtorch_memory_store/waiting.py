"""Waits that wake one thread, the one meant."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from dtorch_core.presence import Wait

log = logging.getLogger("dtorch")

_LONGEST = threading.TIMEOUT_MAX
"""Seconds that a lock can be waited for."""


class Waiter(Wait):
    """One blocked thread of one rank: asleep on a lock of its own, so that nobody else's wake-up disturbs it."""

    __slots__ = ("_lock",)

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._lock = threading.Lock()
        self._lock.acquire()

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
        Wait.__init__(self, rank)  # without a lock
        self._callback = callback

    def wake(self) -> None:
        try:
            self._callback()
        except Exception:  # of whoever asked for it: the waiters behind it have to be woken all the same
            log.exception("rank %d: a callback at the end of a wait failed", self.rank)


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake settled waiters; outside the mutex."""
    for waiter in waiters:
        waiter.wake()
