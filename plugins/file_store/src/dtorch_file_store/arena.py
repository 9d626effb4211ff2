"""Memory that this process shares with the others of its session: handed out in blocks, and used again.

A tensor may be dropped anywhere, even by the garbage collector while this thread is at work in here. So what is
released is only noted, and taken back by whoever has the mutex next.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtorch_core._text import size_text
from dtorch_core.errors import AbortedError, NoRoomError
from dtorch_file_store.extents import Extents, part_size
from dtorch_file_store.headroom import VARIABLE
from dtorch_file_store.segments import PAGE, Mapping, Segment, bytes_of

__all__ = ["Arena", "Block", "Mapping", "Segment"]

_FIRST = 4 << 20
_LARGEST_GROWTH = 256 << 20
"""A new segment is as large as all before it together, up to this: few file descriptors, and no hoard."""


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
"""Those of this process."""


class Block:
    """Some bytes of an arena's segment, held by whoever retained it; the arena uses them again at the last release."""

    __slots__ = ("_address", "_arena", "_count", "_guard", "_memory", "_size", "nbytes", "offset", "segment")

    def __init__(
        self, arena: Arena, memory: memoryview, address: int, segment: int, offset: int, nbytes: int, size: int
    ) -> None:
        self.segment = segment
        """The number of its segment."""
        self.offset = offset
        """Its first byte's place in the segment; a multiple of 64."""
        self.nbytes = nbytes
        self._arena = arena
        self._memory = memory
        self._address = address
        self._size = size
        self._count = 1
        self._guard: weakref.ref[memoryview] | None = None

    def bytes(self) -> Tensor:
        """Its memory, as ``uint8``. Not to be used after the last release; the tensor alone does not hold the block."""
        return bytes_of(self._memory, self.offset, self.nbytes)

    def retain(self) -> None:
        """Hold it once more. Only for who knows that somebody holds it."""
        self._arena._retain(self)

    def release(self) -> None:
        """Hold it once less. May be called anywhere: in callbacks of the garbage collector too."""
        self._arena._release(self)

    def _release_with(self, buffer: memoryview) -> None:
        """Hold it once less when nothing refers to ``buffer`` any more."""
        self._guard = weakref.ref(buffer, self._dropped)

    def _dropped(self, _: object) -> None:
        self._guard = None
        self._arena._release(self)


class Arena:
    """This process's shared memory in one session. Every method may be called by any thread."""

    def __init__(self, label: str, on_segment: Callable[[Segment], None]) -> None:
        """
        :param label: begins messages.
        :param on_segment: called with each new segment, by the thread that needs it, before a block of it is handed
            out. It may not allocate. If it raises, the segment is dropped, and the error goes to that thread.
        """
        self._label = label
        self._on_segment = on_segment
        self._mutex = threading.Lock()
        self._growing = threading.Lock()
        """Held by the one thread that makes a segment; taken before the mutex."""
        self._extents = Extents()
        self._live: dict[int, Block] = {}
        """By address."""
        self._released: deque[Block] = deque()
        self._segments: dict[int, Segment] = {}
        self._made = 0
        self._closed = False
        _arenas.add(self)

    @property
    def segments(self) -> list[Segment]:
        """All there are, the newest last; a new one is here before ``on_segment`` is called with it."""
        with self._mutex:
            return list(self._segments.values())

    def allocate(self, nbytes: int) -> Block:
        """A block that the caller holds; what its bytes are is not said.

        :raises NoRoomError: if this process may not have so much, or the machine has not so much.
        :raises AbortedError: if the arena is closed.
        """
        if nbytes < 1:
            raise ValueError(f"a block has at least 1 byte, not {nbytes}")

        size = part_size(nbytes)
        return self._take(nbytes, size) or self._grow(nbytes, size)

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in a block of its own, which it holds as long as its storage lives.

        :raises NoRoomError: as :meth:`allocate` does.
        """
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes <= 0:  # no byte is needed, or torch says what is wrong
            return torch.empty(size, dtype=dtype)

        block = self.allocate(nbytes)
        buffer = block._memory[block.offset : block.offset + nbytes]
        block._release_with(buffer)
        return torch.frombuffer(buffer, dtype=dtype).view(size)

    def locate(self, tensor: Tensor) -> tuple[Block, int] | None:
        """The live block that ``tensor`` lies in, and the place of its first element there, in bytes; None if none."""
        if not tensor.is_cpu or not tensor.numel():
            return None

        storage = tensor.untyped_storage()
        block = self._live.get(storage.data_ptr())
        if block is None or storage.nbytes() > block.nbytes:
            return None

        return block, int(tensor.storage_offset()) * tensor.element_size()

    def trim(self) -> None:
        """Give the machine back the pages of the segments of which nothing is used."""
        with self._growing:
            self._trim()

    def close(self) -> None:
        """Unmap what nobody uses. Tensors that still live keep their memory."""
        with self._growing, self._mutex:
            self._closed = True
            segments = list(self._segments.values())
            self._segments.clear()
            self._live.clear()
            self._released.clear()
            self._extents = Extents()
            for segment in segments:
                segment.close()

    def _take(self, nbytes: int, size: int) -> Block | None:
        with self._mutex:
            self._settle()
            place = self._extents.take(size)
            return None if place is None else self._hand_out(*place, nbytes, size)

    def _hand_out(self, number: int, offset: int, nbytes: int, size: int) -> Block:
        segment = self._segments[number]
        address = segment.address + offset
        block = self._live[address] = Block(self, segment.memory, address, number, offset, nbytes, size)
        return block

    def _retain(self, block: Block) -> None:
        with self._mutex:
            block._count += 1

    def _release(self, block: Block) -> None:
        self._released.append(block)
        # If the mutex is taken, maybe by this very thread, the next one who takes it settles this.
        if not self._mutex.locked():
            with self._mutex:  # and no acquire(): an interrupt after it would leave it locked
                self._settle()

    def _settle(self) -> None:
        """Take back what was released. The mutex is held."""
        while self._released:
            block = self._released.popleft()
            block._count -= 1
            if not block._count and self._live.get(block._address) is block:
                del self._live[block._address]
                self._extents.give(block.segment, block.offset, block._size)

    def _grow(self, nbytes: int, size: int) -> Block:
        with self._growing:
            block = self._take(nbytes, size)  # another thread may have grown it meanwhile
            if block is not None:
                return block

            if self._closed:
                raise AbortedError(f"{self._label}: its shared memory is closed")

            segment = self._room_for(nbytes, size)
            with self._mutex:
                if segment.size > size:
                    self._extents.give(segment.number, size, segment.size - size)

                return self._hand_out(segment.number, 0, nbytes, size)

    def _room_for(self, nbytes: int, size: int) -> Segment:
        """A wholly unused segment of at least ``size`` bytes."""
        least = -(-size // PAGE) * PAGE
        try:
            return self._unused(max(least, _FIRST, min(self._held(), _LARGEST_GROWTH)))
        except NoRoomError:
            self._trim_all()  # then it may be had, if it is no larger than needed

        try:
            return self._unused(least)
        except NoRoomError as error:
            raise NoRoomError(self._full(nbytes, str(error))) from error

    def _unused(self, size: int) -> Segment:
        """A segment whose pages were given back, if one is about as large as ``size``; else a new one."""
        dry = [segment for segment in self._segments.values() if segment.dry and size <= segment.size <= 2 * size]
        if dry:
            smallest = min(dry, key=lambda segment: segment.size)
            smallest.refill()
            return smallest

        segment = Segment(self._made, size)
        self._made += 1
        with self._mutex:
            self._segments[segment.number] = segment

        try:
            self._on_segment(segment)
        except BaseException:
            with self._mutex:
                del self._segments[segment.number]

            segment.close()
            raise

        return segment

    def _trim(self) -> None:
        with self._mutex:
            self._settle()
            for segment in self._segments.values():
                if not segment.dry and self._extents.withdraw(segment.number, segment.size):
                    segment.drain()

    def _trim_all(self) -> None:
        """The other arenas of this process too: theirs is the same memory. One that is growing is left alone."""
        self._trim()
        for other in list(_arenas):
            if other is not self and other._growing.acquire(blocking=False):
                try:
                    other._trim()
                finally:
                    other._growing.release()

    def _held(self) -> int:
        return sum(segment.size for segment in self._segments.values() if not segment.dry)

    def _full(self, nbytes: int, why: str) -> str:
        with self._mutex:
            free, largest = self._extents.free_bytes()

        return (
            f"{self._label}: no shared memory for {size_text(nbytes)}: {why}. Of the {size_text(self._held())} that "
            f"this store holds in this process, {size_text(free)} are free, {size_text(largest)} in one piece; of its "
            f"other stores, what none of their tensors uses was given back. Memory is used again when all consumers "
            f"have finished: wait for them earlier, or publish less at a time; or free memory, or raise {VARIABLE} "
            f"where it is set"
        )
