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
        me = threading.get_ident()
        while not (waiter.done or waiter.error is not None):
            left = deadline - time.monotonic()
            try:
                with self._presence.mutex:
                    if waiter.settled:
                        break

                    # A thread that comes here reads no more: if it is said to, a signal's handler has raised twice.
                    drives = (self._driver is None or self._reader == me) and self._thread is not None
                    if drives:
                        self._reader = me
                        self._driver = waiter
                    elif left <= 0:
                        return False
                    else:
                        waiter.prepare()
                        self._followers.append(waiter)

                if drives:
                    self._read(max(0.0, left))
                else:
                    self._sleep(waiter, left)
            except BaseException:  # Ctrl-C, anywhere between these lines: nobody may be thought to be at it
                self._step_back(waiter)
                raise

            if drives and left <= 0:
                return waiter.settled

        return True

    def wake(self, waiter: Waiter) -> None:
        """Let a settled waiter's thread know, if it does not yet. Outside the mutex."""
        if self._driver is waiter:
            if self.here:
                return
        elif not waiter.prepared:  # since it is settled, it will not come to sleep
            return

        with self._presence.mutex:
            if waiter in self._followers and not waiter.signalled:
                waiter.signal()

            reads = self._driver is waiter

        if reads:
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
        woken = waiter.sleep(seconds)
        with self._presence.mutex:
            self._followers.remove(waiter)
            if waiter.signalled and not woken:
                waiter.leave()

            waiter.signalled = False

    def _step_back(self, waiter: Waiter) -> None:
        """A wait was interrupted: its thread neither reads nor sleeps any more."""
        with self._presence.mutex:
            if waiter in self._followers:
                self._followers.remove(waiter)

            waiter.leave()
            waiter.signalled = False

        self._stop_reading(waiter)  # it may have been about to read next
        self._heard()

    def _read(self, seconds: float | None) -> None:
        """Hear once. Called by the driver, which then is it no more."""
        driver = self._driver
        try:
            self._hear(seconds)
        finally:
            self._stop_reading(driver)
            self._heard()

    def _stop_reading(self, driver: object) -> None:
        """Who reads does it no more: let the next one know. May be done twice, where a signal's handler has raised."""
        with self._presence.mutex:
            self._left = time.monotonic()
            self._stints += 1
            if self._driver is driver:
                self._driver, self._reader = None, 0

            if self._driver is None and self._followers:
                heir = next((other for other in self._followers if not other.settled and not other.signalled), None)
                if heir is not None:
                    heir.signal()

            if self._parks:
                self._parked.set()
                self._parks = False

        if self._closing and self._driver is None:
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
                    self._reader = threading.get_ident()
                    self._driver = self

            if reads:
                self._read(None)
            else:
                self._parked.wait(None if parks else LEASE)
                self._parked.clear()
