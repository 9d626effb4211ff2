"""Waits that wake one thread, the one meant."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from dtorch_core.presence import Presence, Wait
from dtorch_memory_store import looking

log = logging.getLogger("dtorch")


class Waiter(Wait):
    """One blocked thread of one rank: asleep on a lock of its own, so that nobody else's wake-up disturbs it."""

    __slots__ = ("lock", "seat")

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.lock = threading.Lock()
        self.lock.acquire()
        self.seat: looking.Seat | None = None

    def wake(self) -> None:
        """Let the thread go on; called once, after ``done`` or ``error`` was set, outside the mutex."""
        looking.wake(self)

    def sleep(self, timeout: float) -> None:
        """Block until woken, or for ``timeout`` seconds."""
        if _here.queues:  # somebody's callback waits: for what other ones do, maybe
            for queue in list(_here.queues.values()):
                _call(queue)

        looking.sleep(self, timeout)


class Notice(Waiter):
    """A callback in a waiter's place: it is called instead of woken."""

    __slots__ = ("_callback", "presence")

    def __init__(self, rank: int, callback: Callable[[], None], presence: Presence) -> None:
        """
        :param presence: of the opening that it is about.
        """
        Wait.__init__(self, rank)  # without a lock
        self._callback, self.presence = callback, presence

    def wake(self) -> None:
        """Call; behind the one that this thread is at, if that is of the same opening. One inside the other would be as
        deep as a chain of messages is long.
        """
        queue = _here.queues.get(self.presence)
        if queue is not None:
            queue.append(self)
            return

        _here.queues[self.presence] = queue = deque([self])
        try:
            _call(queue)
        finally:
            del _here.queues[self.presence]

    def call(self) -> None:
        """Tell that there is an outcome; outside the mutex."""
        try:
            self._callback()
        except Exception:  # of whoever asked for it: the waiters behind it have to be woken all the same
            log.exception("rank %d: a callback at the end of a wait failed", self.rank)


class _Here(threading.local):
    def __init__(self) -> None:
        self.queues: dict[Presence, deque[Notice]] = {}
        """The callbacks that this thread has yet to make, by opening, where it is at one."""


_here = _Here()


def _call(queue: deque[Notice]) -> None:
    while queue:
        queue.popleft().call()


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake settled waiters; outside the mutex."""
    for waiter in waiters:
        waiter.wake()
