"""Copies of tensors whose own memory can't be shared, in memory of the device that can.

torch's expandable segments and the driver's memory pools have no interprocess handles, and another process's memory
can't be offered again. A copy on the device costs little beside a way through the host.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from dtorch_core import streams
from dtorch_core.errors import AbortedError, ProtocolError
from dtorch_file_store.cuda.borrowed import bytes_at
from dtorch_file_store.cuda.current import on
from dtorch_file_store.cuda.driver import Driver, DriverError
from dtorch_file_store.cuda.janitor import JANITOR, Holding
from dtorch_file_store.extents import Extents, part_size
from dtorch_file_store.tensors import compact, read, write

CHUNK = 32 << 20
"""Bytes that the driver is asked for at least."""

_ALIGNMENT = 512
"""Of a part, as torch's own allocator has it."""


class _Chunk(Holding):
    """Memory from the driver, and how many copies lie in it."""

    def __init__(self, calls: Driver, ordinal: int, nbytes: int) -> None:
        super().__init__(calls, ordinal)
        self.copies = 0
        with calls.on(ordinal):
            self.address = calls.allocate(nbytes)

    def unused(self) -> bool:
        return self.copies == 0

    def give_back(self) -> None:
        self._driver.free(self.address)


class Copies:
    """One device's. Thread-safe."""

    def __init__(self, calls: Driver, ordinal: int) -> None:
        self._driver = calls
        self._ordinal = ordinal
        self._mutex = threading.Lock()
        self._chunks: list[_Chunk] = []
        self._free = Extents()
        self._out: dict[int, tuple[int, int, int]] = {}
        """By address: chunk, offset and size of the copies."""
        self._returning: deque[tuple[torch.cuda.Event, tuple[int, int, int]]] = deque()
        self._closed = False

    def copy(self, tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """A copy of the tensor's elements, queued on ``stream``. Its memory is its own until :meth:`give_back`.

        :raises DriverError: if the device has no memory left.
        :raises AbortedError: if this was closed.
        """
        layout = compact(tensor)
        if not layout.nbytes:
            return read(layout, torch.empty(0, dtype=torch.uint8, device=tensor.device))

        with self._mutex:
            address = self._take(-(-part_size(layout.nbytes) // _ALIGNMENT) * _ALIGNMENT)

        memory = bytes_at(address, layout.nbytes, self._ordinal)
        with on(stream):
            write(tensor, layout, memory)

        streams.keep_until_done(tensor, stream)
        return read(layout, memory)

    def give_back(self, copy: Tensor, stream: torch.cuda.Stream) -> None:
        """The copy's memory may be used again behind all that ``stream`` was given: also the waits for consumers.

        :raises ProtocolError: if it is no copy that :meth:`copy` made, or was given back.
        """
        address = copy.untyped_storage().data_ptr()
        if not address:
            return

        with torch.cuda.device(self._ordinal):
            event = torch.cuda.Event()
            event.record(stream)

        with self._mutex:
            part = self._out.pop(address, None)
            if part is None:
                raise ProtocolError("this tensor is no copy that was made here, or was given back already")

            self._returning.append((event, part))
            chunk = self._chunks[part[0]]
            chunk.copies -= 1

        chunk.look()

    def close(self) -> None:
        """Make no more copies. Those that are out keep their memory until they are given back."""
        with self._mutex:
            if self._closed:
                return

            self._closed = True

        for chunk in self._chunks:
            chunk.condemn()

    def _take(self, size: int) -> int:
        """The address of a part. With the mutex held."""
        if self._closed:
            raise AbortedError("no copy can be made: this process has closed its side")

        while self._returning and self._returning[0][0].query():
            _, part = self._returning.popleft()
            self._free.give(*part)

        place = self._free.take(size)
        if place is None:
            self._free.give(*self._grow(size))
            place = self._free.take(size)

        assert place is not None
        number, offset = place
        chunk = self._chunks[number]
        chunk.copies += 1
        self._out[chunk.address + offset] = (number, offset, size)
        return chunk.address + offset

    def _grow(self, size: int) -> tuple[int, int, int]:
        size = max(size, CHUNK)
        try:
            chunk = _Chunk(self._driver, self._ordinal, size)
        except DriverError:
            torch.cuda.empty_cache()  # what torch keeps for itself may be enough
            chunk = _Chunk(self._driver, self._ordinal, size)

        self._chunks.append(chunk)
        JANITOR.hold(chunk)
        return len(self._chunks) - 1, 0, size
