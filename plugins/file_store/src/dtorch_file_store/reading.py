"""Who reads what a node's peers say: one thread at a time.

A thread that waits does it itself, so that a message wakes the thread that it is for, not one that would have to wake
it. The others sleep; whoever stops reading hands that on to one of them. A background thread reads when nobody has
waited for a moment.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

from dtorch_core.presence import Presence
from dtorch_file_store.waiting import Waiter

LEASE = 0.002
"""Seconds without a waiting thread after which the background thread reads: it does not compete with threads that
wait again and again, and a request of another process finds somebody who answers."""


class Reading:
    """The turns of one node's threads."""

    def __init__(
        self,
        presence: Presence,
        hear: Callable[[float | None], None],
        heard: Callable[[], None],
        kick: Callable[[], None],
    ) -> None:
        """
        :param hear: waits until there is something, for so many seconds at most, and handles it.
        :param heard: called after that by the same thread, once another one may read.
        :param kick: ends such a wait.
        """
        self._presence, self._hear, self._heard, self._kick = presence, hear, heard, kick
        self._driver: object | None = None
        """Who reads now: a waiter, or the background thread, of which this object is the sign."""
        self._reader = 0
        """Its thread."""
        self._followers: list[Waiter] = []
        self._left = 0.0
        """When somebody read last."""
        self._stints = 0
        """How often a thread has read."""
        self._parks = False
        """The background thread sleeps until nobody reads any more."""
        self._parked = threading.Event()
        self._closing = False
        self._quiet = threading.Event()
        """Nobody reads any more. Set once the node closes."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """There is somebody to hear.

        :raises OSError: if no thread can be started.
        """
        name = f"{self._presence.label} reader"
        thread = threading.Thread(target=self._read_for_nobody, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # which has the system's reason no more
            raise OSError(errno.EAGAIN, "no thread can be started") from None

        self._thread = thread

    @property
    def here(self) -> bool:
        """It is this very thread that reads."""
        return self._reader == threading.get_ident()

    def wait(self, waiter: Waiter, deadline: float) -> bool:
        """Block until the waiter is settled; false at the deadline, which may be over already: then this only looks."""
        while not (waiter.done or waiter.error is not None):
            left = deadline - time.monotonic()
            with self._presence.mutex:
                if waiter.settled:
                    break

                drives = self._driver is None and self._thread is not None
                if drives:
                    self._driver = waiter
                elif left <= 0:
                    return False
                else:
                    waiter.prepare()
                    self._followers.append(waiter)

            if drives:
                self._read(max(0.0, left))
                if left <= 0:
                    return waiter.settled
            else:
                self._sleep(waiter, left)

        return True

    def wake(self, waiter: Waiter) -> None:
        """Let a settled waiter's thread know, if it does not yet. Outside the mutex."""
        if self._driver is waiter:
            if self.here:
                return
        elif not waiter.prepared:  # since it is settled, it will not come to sleep
            return

        with self._presence.mutex:
            let_go = waiter.signal() if waiter in self._followers and not waiter.signalled else None
            reads = self._driver is waiter

        if let_go is not None:
            let_go()
        elif reads:
            self._kick()

    def looked(self) -> None:
        """A thread has handled what it waited for without a turn: there is still no need for the background thread."""
        self._left = time.monotonic()

    def close(self) -> bool:
        """Nobody begins to read for nobody any more. Whether somebody reads now. Under the mutex."""
        self._closing = True
        return self._driver is not None

    def await_end(self, seconds: float, *, busy: bool) -> None:
        """After :meth:`close`: wait until nobody reads.

        :param busy: what it returned.
        """
        self._parked.set()
        if busy:
            self._kick()
            self._quiet.wait(seconds)

        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _sleep(self, waiter: Waiter, seconds: float) -> None:
        woken: bool | None = None  # not known
        try:
            woken = waiter.sleep(seconds)
        finally:
            with self._presence.mutex:
                self._followers.remove(waiter)
                late = waiter.signalled and woken is False
                waiter.signalled = False
                if woken is None:
                    waiter.leave()

            if late:
                waiter.consume()

    def _read(self, seconds: float | None) -> None:
        """Hear once. Called by the driver, which then is it no more."""
        self._reader = threading.get_ident()
        try:
            self._hear(seconds)
        finally:
            self._stop_reading()
            self._heard()

    def _stop_reading(self) -> None:
        let_go: Callable[[], None] | None = None
        with self._presence.mutex:
            self._driver, self._reader = None, 0
            self._left = time.monotonic()
            self._stints += 1
            if self._followers:
                heir = next((other for other in self._followers if not other.settled and not other.signalled), None)
                if heir is not None:
                    let_go = heir.signal()

            unparks, self._parks = self._parks, False
            closing = self._closing

        if let_go is not None:
            let_go()

        if unparks:
            self._parked.set()

        if closing:
            self._quiet.set()

    def _read_for_nobody(self) -> None:
        stints = 0
        while not self._closing:
            with self._presence.mutex:
                reads = self._driver is None and time.monotonic() - self._left >= LEASE
                # A wait that lasts: whoever reads says when it is over. Short ones are not burdened with that.
                self._parks = parks = self._driver is not None and self._stints == stints
                stints = self._stints
                if reads:
                    self._driver = self

            if reads:
                self._read(None)
            else:
                self._parked.wait(None if parks else LEASE)
                self._parked.clear()
