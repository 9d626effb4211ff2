"""Packets between the maker of a promise and its holder: each arrives whole or not at all, with its descriptor.

A holder sends one outcome in its life, of which at most :data:`INLINE_BYTES` lie in the packet, so that a send never
has to wait: a larger value is written into a file without a name, once, and the file is handed over with the packet.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import struct

import torch
from torch import Tensor

from dtorch_core._text import size_text
from dtorch_core.errors import DtorchError, NoRoomError
from dtorch_core.future import Outcome
from dtorch_file_store.headroom import why_not
from dtorch_file_store.promise_errors import error_of, words_of
from dtorch_file_store.segments import Mapping
from dtorch_file_store.tensors import Layout, compact, read, write
from dtorch_file_store.values import from_bytes, to_bytes
from dtorch_file_store.wire import INLINE_BYTES, Message, Reader, frame

LARGEST = 4 * INLINE_BYTES
"""Bytes of a packet."""

ANSWER = 300.0
"""Seconds that one process waits for an answer of the other, which may be stopped."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CREDENTIALS = struct.Struct("3i")


def new_socket() -> socket.socket:
    """One that carries packets."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and user at the other end, as the kernel knows them. Of a listener's end: who made the listener."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def limit_waits(sock: socket.socket, timeout: float) -> None:
    """Let sends and receives that wait end after so many seconds, with nothing.

    Not settimeout(): then a connect to a server whose queue is full would fail at once.
    """
    limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1_000_000))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def send(sock: socket.socket, packet: bytes, fd: int | None = None) -> None:
    """Send a packet, which never waits.

    :raises OSError: if the other end is closed.
    """
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sock.sendmsg([packet], rights, socket.MSG_DONTWAIT)


def receive(sock: socket.socket, flags: int = socket.MSG_DONTWAIT) -> tuple[bytes, list[int]] | None:
    """The next packet and its descriptors, which the caller closes; ``b""`` at the end, None if there is none now."""
    while True:
        try:
            data, ancillary, _, _ = sock.recvmsg(LARGEST, socket.CMSG_SPACE(8 * 4), flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            continue  # it closed its end without having read all; what it had sent comes after this news

        fds = array.array("i")
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])

        return data, list(fds)


def parse(packet: bytes) -> Message:
    """The message in a packet.

    :raises ValueError: if it is none.
    """
    messages = Reader().feed(packet)
    if len(messages) != 1:
        raise ValueError(f"a packet of {len(packet)} bytes holds {len(messages)} messages")

    return messages[0]


def pack(what: str, outcome: Outcome) -> tuple[bytes, int | None]:
    """An outcome as a packet, and the descriptor to send with it, which the caller closes.

    :param what: opens the message of an error.
    :raises NoRoomError: if there is no memory for a large value.
    """
    if outcome.error is not None:
        name, text, pickled = words_of(outcome.error)
        packet = frame("error", name, text, body=pickled)
        if len(packet) <= INLINE_BYTES:
            return packet, None

        return frame("long", len(packet)), _file_of(what, memoryview(packet))

    return (frame("void"), None) if outcome.tensor is None else pack_value(what, outcome.tensor)


def pack_value(what: str, tensor: Tensor, kind: str = "", about: str = "") -> tuple[bytes, int | None]:
    """A CPU tensor as a packet, and the descriptor to send with it, which the caller closes.

    :param what: opens the message of an error.
    :param kind: of a message that has the usual one among its fields, behind ``about``.
    :raises NoRoomError: if there is no memory for a large value.
    """
    layout = compact(tensor)
    small = layout.nbytes <= INLINE_BYTES
    usual = "value" if small else "file"
    body = to_bytes(tensor, layout) if small else b""
    described = layout.to_json()
    packet = frame(kind, usual, about, described, body=body) if kind else frame(usual, described, body=body)
    if small:
        return packet, None

    stored = _as_stored(tensor, layout)
    memory = (ctypes.c_char * layout.nbytes).from_address(stored.data_ptr())
    return packet, _file_of(what, memoryview(memory).cast("B"))


def unpack(message: Message, fds: list[int], sender: str) -> Outcome:
    """The outcome in a message of a process of this user; it takes the descriptors over from ``fds``.

    :param sender: as messages call it: ``"pid 12"``.
    :raises DtorchError: if there is none in it, or it can't be mapped here.
    """
    kind, fields = message.kind, message.fields
    if kind == "long":
        with open(fds.pop(), "rb") as file:
            message = parse(os.pread(file.fileno(), fields[0], 0))

        kind, fields = message.kind, message.fields

    if kind == "void":
        return Outcome()

    if kind == "value":
        return Outcome(from_bytes(Layout.from_json(fields[0]), message.body))

    if kind == "file":
        layout = Layout.from_json(fields[0])
        memory = Mapping(fds.pop(), layout.nbytes).bytes(0, layout.nbytes)
        return Outcome(read(layout, memory))

    if kind == "error":
        name, text = fields
        return Outcome(error=error_of(name, text, message.body, sender))

    raise DtorchError(f"a message {kind!r} is no outcome of a promise")


def _as_stored(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor whose memory holds the bytes as ``layout`` stores them: itself where it does."""
    if layout.stride == tensor.stride() and not tensor.is_conj() and not tensor.is_neg():
        return tensor

    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    write(tensor, layout, memory)
    return memory


def _file_of(what: str, memory: memoryview) -> int:
    """A sealed file without a name that holds these bytes. Written, not mapped: its pages need no zeros first."""
    nbytes = len(memory)
    refusal = why_not(nbytes)
    if refusal is not None:
        raise NoRoomError(f"{what}: no shared memory for its {size_text(nbytes)}: {refusal}")

    fd = -1
    try:
        fd = os.memfd_create("dtorch-promise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        written = 0
        while written < nbytes:
            written += os.write(fd, memory[written:])

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        if fd >= 0:
            os.close(fd)

        if isinstance(error, OSError):
            raise NoRoomError(
                f"{what}: no shared memory for its {size_text(nbytes)}: the kernel refused it: {error.strerror}"
            ) from error

        raise

    return fd
