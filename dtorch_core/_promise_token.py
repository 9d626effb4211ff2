"""What travels when the right to set a promise is handed over: JSON that names the backend. Never unpickled."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from dtorch_core import __version__
from dtorch_core._text import count
from dtorch_core.errors import ProtocolError

FORMAT = 1
"""The version of the token. Another one is refused."""

MARK = "dtorch promise"


@dataclass(frozen=True, slots=True)
class Token:
    """The backend that made the promise, where, and what that backend's ``attach`` takes."""

    backend: str
    device: str
    inner: bytes

    def to_bytes(self) -> bytes:
        """As :func:`parse` takes it."""
        inner = base64.b64encode(self.inner).decode()
        fields = {"format": MARK, "version": FORMAT, "backend": self.backend, "device": self.device, "token": inner}
        return json.dumps(fields).encode()


def parse(data: object) -> Token:
    """Read a token, which may come from anywhere.

    :raises TypeError: if it is not bytes.
    :raises ProtocolError: if it is not a token, is damaged, or has another version.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"attach_promise: takes the bytes that serialize() returned, not {type(data).__name__}")

    try:
        fields = json.loads(bytes(data))
    except (ValueError, RecursionError):
        fields = None

    if not isinstance(fields, dict) or fields.get("format") != MARK:
        raise ProtocolError(
            f"attach_promise: {count(len(bytes(data)), 'byte')} that are no promise token; "
            f"pass what serialize() returned, whole and unchanged"
        )

    if fields.get("version") != FORMAT:
        raise ProtocolError(
            f"attach_promise: a token of version {fields.get('version')!r}, and dtorch-core {__version__} reads "
            f"version {FORMAT}; install the same dtorch-core on both sides"
        )

    backend, device, inner = (fields.get(name) for name in ("backend", "device", "token"))
    try:
        if isinstance(backend, str) and isinstance(device, str) and isinstance(inner, str):
            return Token(backend, device, base64.b64decode(inner, validate=True))
    except (binascii.Error, ValueError):
        pass

    raise ProtocolError("attach_promise: the promise token is damaged; pass what serialize() returned, unchanged")
