"""Blocked threads of this process, and how each is woken by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dtorch_core.presence import Wait

log = logging.getLogger("dtorch")


class Waiter(Wait):
    """One blocked thread of one rank."""

    __slots__ = ("_lock", "signalled")

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.signalled = False
        """A wake-up is under way. Written under the mutex."""
        self._lock: threading.Lock | None = None  # made by the first sleep: a thread that reads sockets never sleeps

    @property
    def prepared(self) -> bool:
        """Its thread has slept, or is about to. Where it has not when there is an outcome, it never will."""
        return self._lock is not None

    def prepare(self) -> None:
        """Before it may be woken from :meth:`sleep`. Under the mutex."""
        if self._lock is None:
            self._lock = threading.Lock()
            self._lock.acquire()

    def sleep(self, timeout: float) -> bool:
        """Block until woken, or for ``timeout`` seconds; false if that was it."""
        assert self._lock is not None, "prepared"
        return self._lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX) if timeout > 0 else 0)

    def signal(self) -> None:
        """Let the sleeping thread go on; once for each time that it sleeps. Under the mutex: whoever is interrupted
        between the mark and the deed would leave a thread that nobody wakes. It needs the GIL before it needs the
        mutex, and the mutex is free by then."""
        lock = self._lock
        assert lock is not None, "prepared"
        self.signalled = True
        lock.release()

    def leave(self) -> None:
        """The thread was taken out of its sleep, by its time or by Ctrl-C, and nobody can say whether it had been woken
        by then: a wake-up that is under way is let go with what it wakes. Under the mutex."""
        self._lock = None


class Notice(Waiter):
    """A callback in a waiter's place: it is called instead of woken."""

    __slots__ = ("_callback", "_called")

    def __init__(self, rank: int, callback: Callable[[], None]) -> None:
        super().__init__(rank)
        self._callback = callback
        self._called = False

    def call(self) -> None:
        """Tell that there is an outcome, once; outside the mutex."""
        if self._called:
            return

        self._called = True
        try:
            self._callback()
        except Exception:  # of whoever asked for it: the waiters behind it have to be woken all the same
            log.exception("rank %d: a callback at the end of a wait failed", self.rank)
