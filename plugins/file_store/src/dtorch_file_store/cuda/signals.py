"""Order between streams of different processes, without a host that waits.

Each process has a page of counters in shared memory that it alone counts up: its streams store the next number when
they get there. Streams of other processes wait until a counter is at a number. Events between processes could do this
too, but a stream that waits for an event of a process that was killed waits for ever; here the survivor stores the
number itself (:meth:`PeerSignals.release`), without a call of CUDA's.

Each stream has a counter of its own, since only work of one stream ends in the order in which it was queued. Numbers
have 32 bits and are compared as on a circle: a mark is good until 2**31 more were written on its stream.

**A mark is told to others only when :meth:`OwnSignals.write` has returned.** So a wait is always queued after the store
that it waits for, and ends. That matters, for while a stream waits

- streams that share its hardware queue wait behind it: there are eight queues, or CUDA_DEVICE_MAX_CONNECTIONS;
- the first launch of any kernel blocks its thread, and with it every launch of the process, until the wait has ended,
  for CUDA loads kernels lazily (CUDA_MODULE_LOADING=EAGER loads them at the start);
- giving back mappings and pages blocks, which the janitor does.

Other launches, allocations, new mappings, pages and events go on.
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

from dtorch_core.errors import AbortedError, DtorchError, UnsupportedOperationError
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


class _Lane:
    """A stream. Its mutex is held while something is queued: a full queue holds up threads of this stream alone."""

    __slots__ = ("handle", "index", "mutex", "ordinal", "stream", "value")

    def __init__(self, stream: torch.cuda.Stream, index: int) -> None:
        self.stream = stream
        self.ordinal = stream.device_index
        self.handle = stream.cuda_stream
        self.mutex = threading.Lock()
        self.index = index
        """Of its counter, on one's own page."""
        self.value = 0
        """The number written last."""


class _Page(Holding):
    """The counters, as host memory that devices use too, from the first use on until no stream does any more."""

    def __init__(self, calls: Driver, fd: int) -> None:
        super().__init__(calls, ordinal=0)
        memory = mmap.mmap(fd, PAGE_BYTES)
        self._counters = memoryview(memory).cast("I")
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._address = 0
        """Where devices find it; 0 while they do not know it."""
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._mutex = threading.Lock()
        self._closed = False

    def reached(self, mark: Mark) -> bool:
        """The stream has got to the mark, as the host sees it."""
        return at_least(self._counters[mark.counter], mark.value)

    def _lane(self, stream: torch.cuda.Stream) -> _Lane:
        """This page's side of a stream. Devices know the page from the first one on."""
        ordinal, handle = stream.device_index, stream.cuda_stream
        lane = self._lanes.get((ordinal, handle))
        if lane is not None:
            return lane

        with self._mutex:
            self._check_open()
            if not self._address:
                with self._driver.on(ordinal):
                    self._address = self._driver.host_register(self._host, PAGE_BYTES)

                self.ordinal = ordinal
                JANITOR.hold(self)

            return self._lanes.setdefault((ordinal, handle), self._new_lane(stream))

    def _new_lane(self, stream: torch.cuda.Stream) -> _Lane:
        return _Lane(stream, len(self._lanes))

    def _check_open(self) -> None:
        if self._closed:
            raise AbortedError("no signal can be queued: this process has closed its side")

    def close(self) -> None:
        """No more signals. What streams have queued still happens; the page goes when all of it has. Never blocks."""
        with self._mutex:
            if self._closed:
                return

            self._closed = True
            self._let_go()

        self.condemn()

    def _let_go(self) -> None:
        """What is not needed for what streams have queued. Called once, with the mutex held."""

    def give_back(self) -> None:
        for lane in list(self._lanes.values()):
            with lane.mutex:  # whoever comes later sees that the page is closed
                pass

        self._driver.host_unregister(self._host)
        # Who still looks sees how it was. The page goes with the last that refers to it.
        self._counters = memoryview(bytearray(self._counters)).cast("I")


class OwnSignals(_Page):
    """This process's page: its streams store, others wait. Thread-safe."""

    def __init__(self, calls: Driver) -> None:
        """
        :raises OSError: if no file descriptor is left.
        """
        self.fd = os.memfd_create("dtorch-signals", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Passed to each peer once. Closed by :meth:`close`."""
        try:
            os.ftruncate(self.fd, PAGE_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            super().__init__(calls, self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def mark(self, stream: torch.cuda.Stream) -> Mark | None:
        """A mark behind all that ``stream`` was given so far; None if it has done all of it.

        Nobody has to wait for a stream that is idle. So no signal is queued on it, and the GPU need not switch to this
        process, which takes longer than a small kernel does.

        :raises UnsupportedOperationError: as :meth:`write` does, and so on.
        """
        self._check_not_captured(stream)  # to look at it would spoil the graph
        return None if stream.query() else self._write(stream)

    def write(self, stream: torch.cuda.Stream) -> Mark:
        """Queue a signal on ``stream``, behind all that it was given so far: the mark that others can wait for.

        :raises UnsupportedOperationError: if the stream is captured into a graph, which would store it at each replay.
        :raises DriverError: if the driver refuses.
        :raises AbortedError: if the page is closed.
        """
        self._check_not_captured(stream)
        return self._write(stream)

    def _check_not_captured(self, stream: torch.cuda.Stream) -> None:
        if self._driver.capturing(stream):
            raise UnsupportedOperationError(
                "the stream is captured into a graph, and a graph can't signal: exchange tensors outside of graphs"
            )

    def _write(self, stream: torch.cuda.Stream) -> Mark:
        lane = self._lane(stream)
        with lane.mutex:
            self._check_open()
            value = (lane.value + 1) % _CIRCLE
            self._driver.stream_write(lane.ordinal, lane.handle, self._address + 4 * lane.index, value)
            lane.value = value

        return Mark(lane.index, value)

    def finish(self) -> None:
        """Block until every stream got to its last mark. A process that ends cuts its streams off before that."""
        for lane in list(self._lanes.values()):
            if not self.reached(Mark(lane.index, lane.value)):
                lane.stream.synchronize()

    def _new_lane(self, stream: torch.cuda.Stream) -> _Lane:
        lane = super()._new_lane(stream)
        if lane.index == COUNTERS:
            raise DtorchError(
                f"this process signals from {COUNTERS} streams already, one counter each; use fewer streams"
            )

        lane.value = self._counters[lane.index]
        return lane

    def _let_go(self) -> None:
        os.close(self.fd)


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
        self._stored: set[int] = set()
        """Counters that this process has set in the peer's place."""
        self._dying = threading.Lock()
        """Guards these two. Never held across a call of the driver: it may be blocked until this peer is released."""

    def wait(self, mark: Mark, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait until the peer's stream is at the mark. The host goes on.

        Nothing is queued where the host sees that it is, or after :meth:`release`.

        :raises DriverError: if the driver refuses.
        :raises AbortedError: if the page is closed.
        """
        if self.released or at_least(self._counters[mark.counter], mark.value):
            return

        lane = self._lane(stream)
        with self._dying:
            if self.released:
                return

            counter, value = mark
            awaited = self._awaited.get(counter)
            if awaited is None or at_least(value, awaited):
                self._awaited[counter] = value

        with lane.mutex:
            self._check_open()
            self._driver.stream_wait(lane.ordinal, lane.handle, self._address + 4 * counter, value)

    def reached(self, mark: Mark) -> bool:
        """The peer's stream has got to the mark, as the host sees it; or the peer was released."""
        return self.released or super().reached(mark)

    def happened(self, mark: Mark) -> bool:
        """The peer's stream has got to the mark itself, released or not: what it wrote is there."""
        return mark.counter not in self._stored and super().reached(mark)

    def release(self) -> None:
        """Let every stream go that waits here, now and later: the peer is dead. Call it again whenever in doubt.

        A store that the peer's stream had begun could come after this one, until its process is gone, and set a counter
        back to a lower number; calling this again makes good for it. It can be called after :meth:`close` too.
        """
        with self._dying:
            self.released = True
            for counter, value in self._awaited.items():
                if not at_least(self._counters[counter], value):
                    self._stored.add(counter)
                    self._counters[counter] = (value + _AHEAD) % _CIRCLE
