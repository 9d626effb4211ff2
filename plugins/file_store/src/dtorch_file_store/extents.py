"""Which parts of the segments are free.

Bookkeeping alone; whoever calls holds the arena's mutex. A part that comes back waits whole for the next request of
its size, which is what a loop asks for. Only when a request finds no room are such parts joined with their neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort

GRANULE = 64
"""Bytes. Every part begins at a multiple of it: a cache line, and right for every dtype."""

_FINEST = 16
"""Parts above 1 MiB are multiples of 1 << 16 bytes."""


def part_size(nbytes: int) -> int:
    """The size of the part that holds ``nbytes``: at most an eighth more above 1 KiB."""
    step = max(GRANULE, 1 << min((nbytes - 1).bit_length() - 4, _FINEST)) if nbytes > GRANULE else GRANULE
    return -(-nbytes // step) * step


class Extents:
    """Free parts of numbered segments."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        """By size, what came back: (segment, offset)."""
        self._sizes: list[tuple[int, int, int]] = []
        """The joined parts, smallest first: (size, segment, offset)."""
        self._starts: dict[tuple[int, int], int] = {}
        """The size of the joined part that begins at (segment, offset)."""
        self._ends: dict[tuple[int, int], int] = {}
        """The size of the joined part that ends at (segment, offset)."""

    def take(self, size: int) -> tuple[int, int] | None:
        """Segment and offset of ``size`` bytes; None where no part is large enough."""
        waiting = self._waiting.get(size)
        if waiting:
            return waiting.pop()

        return self._carve(size) or (self._carve(size) if self._join_all() else None)

    def give(self, segment: int, offset: int, size: int) -> None:
        """A part is free."""
        self._waiting.setdefault(size, []).append((segment, offset))

    def free_bytes(self) -> tuple[int, int]:
        """How many bytes are free, and how large the largest part is."""
        self._join_all()
        return sum(size for size, _, _ in self._sizes), self._sizes[-1][0] if self._sizes else 0

    def withdraw(self, segment: int, size: int) -> bool:
        """Take a whole segment of ``size`` bytes out, if all of it is free; whether it was."""
        self._join_all()
        if self._starts.get((segment, 0)) != size:
            return False

        self._remove(segment, 0, size)
        return True

    def _carve(self, size: int) -> tuple[int, int] | None:
        index = bisect_left(self._sizes, (size,))
        if index == len(self._sizes):
            return None

        found, segment, offset = self._sizes[index]
        self._remove(segment, offset, found)
        if found > size:
            self._insert(segment, offset + size, found - size)

        return segment, offset

    def _join_all(self) -> bool:
        """Join what waits with its neighbours; whether anything waited."""
        parts = [(segment, offset, size) for size, places in self._waiting.items() for segment, offset in places]
        self._waiting.clear()
        for segment, offset, size in parts:
            before = self._ends.get((segment, offset))
            if before is not None:
                self._remove(segment, offset - before, before)
                offset, size = offset - before, size + before

            after = self._starts.get((segment, offset + size))
            if after is not None:
                self._remove(segment, offset + size, after)
                size += after

            self._insert(segment, offset, size)

        return bool(parts)

    def _insert(self, segment: int, offset: int, size: int) -> None:
        insort(self._sizes, (size, segment, offset))
        self._starts[segment, offset] = size
        self._ends[segment, offset + size] = size

    def _remove(self, segment: int, offset: int, size: int) -> None:
        del self._sizes[bisect_left(self._sizes, (size, segment, offset))]
        del self._starts[segment, offset], self._ends[segment, offset + size]
