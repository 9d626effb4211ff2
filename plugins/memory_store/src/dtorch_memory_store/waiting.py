"""Waits that wake one thread, the one meant.

In a program's main thread Ctrl-C raises KeyboardInterrupt anywhere, and so may any signal's handler what it likes: also
under the mutex, and before a thread is woken that has been told nothing of it yet. Others would wait for ever. So:

- Who gets an outcome is *owed* a wake-up in the same moment. It stays so until it has been woken; twice does no harm.
- What has begun under the mutex is written so that what is left of it can be seen, and be done by anybody: each part
  has its ``mend``. A call that ends with an exception mends what it has left, and so does a rank that leaves or aborts.

Handlers run where a function begins, where a loop goes back, and after a call of C; never between plain statements that
do none of this. Those that have to be one step, are such ones.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from dtorch_core.presence import Failure, Presence, Wait
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
        """Let the thread go on; called after ``done`` or ``error`` was set, outside the mutex."""
        looking.wake(self)

    def sleep(self, timeout: float) -> None:
        """Block until woken, or for ``timeout`` seconds."""
        if _here.queues:  # somebody's callback waits: for what other ones do, maybe
            for queue in list(_here.queues.values()):
                _call(queue)

        looking.sleep(self, timeout)


Owed = dict[Waiter, None]
"""Those of one opening that have an outcome, and have yet to be woken, in order. To add one is a plain statement."""


class Notice(Waiter):
    """A callback in a waiter's place: it is called instead of woken, once."""

    __slots__ = ("_calls", "_owed", "presence")

    def __init__(self, rank: int, callback: Callable[[], None], presence: Presence, owed: Owed) -> None:
        """
        :param presence: of the opening that it is about.
        """
        Wait.__init__(self, rank)  # without a lock
        self._calls, self.presence, self._owed = [callback], presence, owed

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
            for notice in queue:  # this thread was interrupted
                self._owed[notice] = None

            del _here.queues[self.presence]

    def call(self) -> None:
        """Tell that there is an outcome; outside the mutex."""
        try:
            callback = self._calls[0]
            del self._calls[0]  # whoever takes it calls it
        except IndexError:
            return

        try:
            callback()
        except Exception:  # of whoever asked for it: the waiters behind it have to be woken all the same
            log.exception("rank %d: a callback at the end of a wait failed", self.rank)


class _Here(threading.local):
    def __init__(self) -> None:
        self.queues: dict[Presence, deque[Notice]] = {}
        """The callbacks that this thread has yet to make, by opening, where it is at one."""


_here = _Here()


def _call(queue: deque[Notice]) -> None:
    while queue:
        notice = queue[0]
        del queue[0]
        try:
            notice.call()
        except BaseException:
            queue.appendleft(notice)  # before it has begun, maybe
            raise


def fail(waiters: Iterable[Waiter], failure_of: Callable[[Waiter], Failure | None], owed: Owed) -> None:
    """Fail those that have no outcome yet and for which there is a failure. Under the mutex."""
    for waiter in waiters:
        failure = None if waiter.settled else failure_of(waiter)
        if failure is not None:
            waiter.error = failure
            owed[waiter] = None


def wake(waiters: Iterable[Waiter], owed: Owed) -> None:
    """Wake settled waiters; outside the mutex."""
    for waiter in waiters:
        waiter.wake()
        try:
            del owed[waiter]
        except KeyError:  # somebody else has woken it too
            pass


def wake_all(owed: Owed) -> None:
    """Wake whoever is owed it, by whomever; outside the mutex."""
    wake(list(owed), owed)
