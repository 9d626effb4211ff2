"""Messages between nodes: a length, and a value of plain types that says what it is.

They are marshalled, which is several times as fast as JSON. Whoever unmarshals trusts what it reads (it runs no code,
but broken bytes may crash it): so nobody may be listened to of whom the kernel has not said that it is this user.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

_LENGTH = struct.Struct("<I")
_HEAD, _length = _LENGTH.size, _LENGTH.unpack_from
_FORMAT = 2
"""Of marshal: every Python reads it. Later ones look for objects that come twice, which takes as long as all else."""

INLINE_BYTES = 16 * 1024
"""A tensor of at most so many bytes rides in the message. (Measured: up to here that costs less than a block of an
arena, which the other process has to map and give back.)"""


class Message(NamedTuple):
    """One message as it arrived."""

    kind: str
    fields: tuple[Any, ...]
    body: bytes


_of = tuple.__new__
"""A named tuple of what there is already: its own way to it takes twice as long."""


_BARE: dict[type, Callable[[Any], Any]] = {
    bool: bool,
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
"""How to get at what is in a subclass, whatever it says of itself."""


def frame(kind: str, *fields: Any, body: bytes = b"") -> bytes:  # noqa: ANN401 - plain values
    """A message as it travels: the length of what follows, little-endian, 4 bytes, and that.

    :param fields: numbers, strings, bytes, None, and tuples, lists, sets and dictionaries of such.
    """
    try:
        said = marshal.dumps((kind, fields, body), _FORMAT)
    except ValueError:  # it knows no subclasses: of a string that a user made a key of, for example
        said = marshal.dumps((kind, _plain(fields), body), _FORMAT)

    return _LENGTH.pack(len(said)) + said


def _plain(value: Any) -> Any:  # noqa: ANN401
    """The same without subclasses: of each type what it was made from."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}

    if isinstance(value, list):
        return [_plain(each) for each in value]

    if isinstance(value, tuple):
        return tuple([_plain(each) for each in value])

    for kind, bare in _BARE.items():
        if isinstance(value, kind):
            return bare(value)

    return value


class Reader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest: Rest = NOTHING

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes."""
        messages, self._rest = cut(self._rest, data)
        return messages


Rest = tuple[tuple[bytes, ...], int]
"""What has come of a message that is not complete, and the bytes without which it can't be."""

NOTHING: Rest = (), 0


def cut(rest: Rest, data: bytes) -> tuple[list[Message], Rest]:
    """The messages that ``data`` completes, and what is left. Changes nothing: who is interrupted does it again."""
    pieces, missing = rest
    if pieces:
        pieces, missing = (*pieces, data), missing - len(data)
        if missing > 0:
            return [], (pieces, missing)

        data = b"".join(pieces)

    messages: list[Message] = []
    at, end = 0, len(data)
    while at < end:
        start = stop = at + _HEAD
        if start <= end:
            stop += _length(data, at)[0]

        if stop > end:
            return messages, ((data[at:],), stop - end)

        messages.append(_of(Message, marshal.loads(data[start:stop])))
        at = stop

    return messages, NOTHING
