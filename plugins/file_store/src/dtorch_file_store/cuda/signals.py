"""Order between streams of different processes, without a host that waits.

Each process has a page of counters in shared memory that it alone counts up: its streams store the next number when
they get there. Streams of other processes wait until a counter is at a number. Events between processes could do this
too, but a stream that waits for an event of a process that was killed waits for ever; here the survivor stores the
number itself (:meth:`PeerSignals.release`).

Each stream has a counter of its own, since only work of one stream ends in the order in which it was queued. Numbers
have 32 bits and are compared as on a circle: a mark is good until 2**31 more were written on its stream.

**A mark is told to others only when :meth:`OwnSignals.write` has returned.** So a wait is always queued after the store
that it waits for. Streams share the hardware's queues (eight in a process, unless CUDA_DEVICE_MAX_CONNECTIONS says
otherwise), and a wait can hold back unrelated streams behind it; in this order it never holds back what it waits for.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtorch_core.errors import AbortedError, DtorchError
from dtorch_file_store.cuda.driver import Driver
from dtorch_file_store.cuda.janitor import JANITOR, Holding

PAGE_BYTES = 16384
"""Of a page of counters: as many streams as a process has use for, and whole pages of every system."""

COUNTERS = PAGE_BYTES // 4

_CIRCLE = 1 << 32
_AHEAD = 1 << 29
"""How far past the last awaited number a released counter is set: every survivor's waits lie below, whichever of them
stored last."""


class Mark(NamedTuple):
    """A point of a process's stream, for others to wait for. JSON-able as a list."""

    counter: int
    value: int

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Mark:
        """From a list of the two."""
        return cls(*values)


def at_least(now: int, value: int) -> bool:
    """A counter that shows ``now`` has got to ``value``, as a waiting stream compares them."""
    return (now - value) % _CIRCLE < _CIRCLE // 2


class _Page(Holding):
    """The counters, as host memory that devices use too, from the first use on until no stream does any more."""

    def __init__(self, calls: Driver, fd: int) -> None:
        super().__init__(calls, ordinal=0)
        memory = mmap.mmap(fd, PAGE_BYTES)
        self._counters = memoryview(memory).cast("I")
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._device_address = 0
        self._mutex = threading.Lock()
        self._calls = 0
        """Threads that are queueing something. With the mutex held."""
        self._closed = False

    def reached(self, mark: Mark) -> bool:
        """The stream has got to the mark, as the host sees it."""
        return at_least(self._counters[mark.counter], mark.value)

    def _begin(self, ordinal: int) -> int:
        """Where devices find the counters; they stay there until :meth:`_end`. With the mutex held."""
        if self._closed:
            raise AbortedError("this page of signals is closed")

        if not self._device_address:
            with self._driver.on(ordinal):
                self._device_address = self._driver.host_register(self._host, PAGE_BYTES)

            self.ordinal = ordinal
            JANITOR.hold(self)

        self._calls += 1
        return self._device_address

    def _end(self) -> None:
        with self._mutex:
            self._calls -= 1

        self.look()

    def unused(self) -> bool:
        return self._calls == 0

    def close(self) -> None:
        """No more signals. What streams have queued still happens; the page goes when all of it has. Never blocks."""
        with self._mutex:
            if self._closed:
                return

            self._closed = True

        self.condemn()

    def give_back(self) -> None:
        self._driver.host_unregister(self._host)
        # Who still looks sees how it was. The page goes with the last that refers to it.
        self._counters = memoryview(bytearray(self._counters)).cast("I")


class _Counter:
    """One stream's."""

    __slots__ = ("index", "mutex", "stream", "value")

    def __init__(self, stream: torch.cuda.Stream, index: int, value: int) -> None:
        self.stream = stream
        self.index = index
        self.value = value
        self.mutex = threading.Lock()


class OwnSignals(_Page):
    """This process's page: its streams store, others wait. Thread-safe."""

    def __init__(self, calls: Driver) -> None:
        """
        :raises OSError: if no file descriptor is left.
        """
        self.fd = os.memfd_create("dtorch-signals", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Passed to each peer once."""
        try:
            os.ftruncate(self.fd, PAGE_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            super().__init__(calls, self.fd)
        except BaseException:
            os.close(self.fd)
            raise

        self._by_stream: dict[tuple[int, int], _Counter] = {}

    def write(self, stream: torch.cuda.Stream) -> Mark:
        """Queue a signal on ``stream``, behind all that it was given so far: the mark that others can wait for.

        :raises DriverError: if the driver refuses.
        :raises AbortedError: if the page is closed.
        """
        ordinal, handle = stream.device_index, stream.cuda_stream
        with self._mutex:
            counter = self._by_stream.get((ordinal, handle))
            if counter is None:
                counter = self._by_stream[ordinal, handle] = self._counter(stream)

            address = self._begin(ordinal)

        try:
            with counter.mutex:  # numbers are queued in their order; a full queue holds up this stream's threads alone
                value = (counter.value + 1) % _CIRCLE
                with self._driver.on(ordinal):
                    self._driver.stream_write(handle, address + 4 * counter.index, value)

                counter.value = value
        finally:
            self._end()

        return Mark(counter.index, value)

    def finish(self) -> None:
        """Block until every stream got to its last mark. A process that ends cuts its streams off before that."""
        with self._mutex:
            counters = list(self._by_stream.values())

        for counter in counters:
            if not self.reached(Mark(counter.index, counter.value)):
                counter.stream.synchronize()

    def _counter(self, stream: torch.cuda.Stream) -> _Counter:
        index = len(self._by_stream)
        if index == COUNTERS:
            raise DtorchError(
                f"this process signals from {COUNTERS} streams already, one counter each; use fewer streams"
            )

        return _Counter(stream, index, self._counters[index])

    def close(self) -> None:
        """As of every page; the file descriptor is closed at once."""
        with self._mutex:
            if not self._closed:
                os.close(self.fd)

        super().close()


class PeerSignals(_Page):
    """A peer's page: streams of this process wait for it. Thread-safe."""

    def __init__(self, calls: Driver, fd: int) -> None:
        """
        :param fd: of the peer's :attr:`OwnSignals.fd`; closed by this.
        """
        try:
            super().__init__(calls, fd)
        finally:
            os.close(fd)

        self._awaited: dict[int, int] = {}
        """The number awaited last, by counter."""
        self.released = False

    def wait(self, mark: Mark, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait until the peer's stream is at the mark. The host goes on.

        Nothing is queued where the host sees that it is, or after :meth:`release`.

        :raises DriverError: if the driver refuses.
        :raises AbortedError: if the page is closed.
        """
        if self.released or self.reached(mark):
            return

        ordinal, handle = stream.device_index, stream.cuda_stream
        with self._mutex:
            if self.released:
                return

            address = self._begin(ordinal)
            awaited = self._awaited.get(mark.counter, mark.value)
            self._awaited[mark.counter] = mark.value if at_least(mark.value, awaited) else awaited

        try:
            with self._driver.on(ordinal):
                self._driver.stream_wait(handle, address + 4 * mark.counter, mark.value)
        finally:
            self._end()

    def reached(self, mark: Mark) -> bool:
        """The peer's stream has got to the mark, as the host sees it; or the peer was released."""
        return self.released or super().reached(mark)

    def release(self) -> None:
        """Let every stream go that waits here, now and later: the peer is dead. Call it again whenever in doubt.

        A store that the peer's stream had begun could come after this one, until its process is gone, and set a counter
        back to a lower number; calling this again makes good for it. It can be called after :meth:`close` too.
        """
        with self._mutex:
            self.released = True
            for counter, value in self._awaited.items():
                if not at_least(self._counters[counter], value):
                    self._counters[counter] = (value + _AHEAD) % _CIRCLE
