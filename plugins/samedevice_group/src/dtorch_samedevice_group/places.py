"""Where tensors lie: what one kernel may read and write at a time. Numbers only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

WIDEST = 16
"""Bytes that a thread can move at once, where their address is a multiple of it."""

WORD = 8
"""Bytes of the largest number."""


def step_of(rows: Sequence[Sequence[int] | None], nbytes: int) -> int | None:
    """The distance from each address of a row to the next, where it is one for all rows; 0 in rows of one.

    None where it is not, where a row could not be read, or where ``nbytes`` do not fit into it.
    """
    first = rows[0]
    if first is None:
        return None

    if len(first) == 1:
        return None if None in rows else 0

    step = first[1] - first[0]
    if step < nbytes or step <= 0:
        return None

    for row in rows:
        if row is None or list(row) != list(range(row[0], row[0] + len(first) * step, step)):
            return None

    return step


def apart(written: Collection[int], written_bytes: int, read: Collection[int], read_bytes: int) -> bool:
    """Nothing that is written meets anything else. What is only read may meet."""
    if not read:
        places = sorted(written)
        return all([after - place >= written_bytes for place, after in pairwise(places)])

    spans = [(place, place + written_bytes, True) for place in written]
    spans += [(place, place + read_bytes, False) for place in read]
    spans.sort()
    end = written_end = 0
    for start, stop, writes in spans:
        if start < (end if writes else written_end):
            return False

        end = max(end, stop)
        if writes:
            written_end = max(written_end, stop)

    return True


def alignment(width: int, *numbers: int) -> int:
    """Of what all the addresses and distances are multiples: 16, or else an element's width; 0 if of neither."""
    bits = 0
    for number in numbers:
        bits |= number

    if not bits % WIDEST:
        return WIDEST

    return 0 if bits % width else width


def word(nbytes: int, *numbers: int) -> tuple[int, int]:
    """The widest word in which ``nbytes`` can be copied between such addresses; and as :func:`alignment`."""
    bits = nbytes | WORD
    for number in numbers:
        bits |= number

    width = bits & -bits
    return width, alignment(width, *numbers)
