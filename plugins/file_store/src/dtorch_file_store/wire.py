"""Messages between nodes: a JSON head that says what it is, and raw bytes. Nothing that arrives is unpickled."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

_LENGTHS = struct.Struct("<II")
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode

INLINE_BYTES = 16 * 1024
"""A tensor of at most so many bytes rides in the message. (Measured: up to here that costs less than a block of an
arena, which the other process has to map and give back.)"""


class Message(NamedTuple):
    """One message as it arrived."""

    kind: str
    fields: list[Any]
    body: bytes


def frame(kind: str, *fields: object, body: bytes = b"") -> bytes:
    """A message as it travels: the lengths of head and body, little-endian, 4 bytes each, then both."""
    head = _encode((kind, *fields)).encode()
    return b"".join((_LENGTHS.pack(len(head), len(body)), head, body))


class Reader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes."""
        if self._buffer:
            self._buffer += data
            data = bytes(self._buffer) if self._complete(self._buffer) else b""
            if not data:
                return []

            self._buffer.clear()

        messages, at, end = [], 0, len(data)
        while end - at >= _LENGTHS.size:
            head, body = _LENGTHS.unpack_from(data, at)
            start = at + _LENGTHS.size
            if end - start < head + body:
                break

            kind, *fields = _decode(data[start : start + head].decode())
            messages.append(Message(kind, fields, data[start + head : start + head + body]))
            at = start + head + body

        self._buffer += data[at:]
        return messages

    @staticmethod
    def _complete(buffer: bytearray) -> bool:
        if len(buffer) < _LENGTHS.size:
            return False

        head, body = _LENGTHS.unpack_from(buffer)
        return len(buffer) >= _LENGTHS.size + head + body
