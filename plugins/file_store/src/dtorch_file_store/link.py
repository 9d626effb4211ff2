"""The connection to one other process of a session: messages in order, descriptors with them, never a blocking send.

A signal's handler may raise after any call, at the start of a function, and where a loop goes round: also between a
call to the kernel and the line that would keep what it returned. Bytes would be lost then, or sent twice. But it raises
nowhere else. So a loop makes such a call here, ``for self._kept in map(call, ...)``, which keeps what it returned
before any handler runs; and what follows from it takes effect in assignments with no call among them. Whoever comes
next goes on from there.
"""

from __future__ import annotations

import array
import io
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from dtorch_core._meeting.deaths import LONGEST
from dtorch_core.errors import DtorchError
from dtorch_file_store.wire import NOTHING, Message, Rest, cut

_RECEIVE = 64 * 1024
_FDS = socket.CMSG_SPACE(64 * array.array("i").itemsize)
"""Bytes that 64 descriptors take."""

_TRUNCATED = int(socket.MSG_CTRUNC)
"""A plain number: an enum's member would cost as much as to receive a message."""

LOST = -1
"""Stands for a descriptor that a process could not take, since it has as many as it may have."""

_TOGETHER = 64 * 1024
"""Bytes from which on messages are not joined: what a peer that does not read leaves here is not copied again."""


def lost(label: str, what: str) -> DtorchError:
    """What is raised where a descriptor is needed that is :data:`LOST`."""
    return DtorchError(
        f"{label}: this process had no descriptor left for {what}, and can't read what lies there; raise the limit "
        f"(ulimit -n), and open {label} anew"
    )


def ready(descriptors: Iterable[int], seconds: float, event: int = select.POLLIN) -> set[int]:
    """Which of them are ready within so many seconds. (``select()`` knows none above 1023.)"""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, event)

    return {descriptor for descriptor, _ in poll.poll(min(max(0.0, seconds), LONGEST) * 1e3)}


class Link:
    """What is queued leaves in the order in which it was queued. A peer that reads nothing makes nobody wait."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        """
        :param peer: the other node's number.
        """
        sock.setblocking(False)
        self.socket = sock
        self.peer = peer
        self.reading = threading.Lock()
        """Held while messages are received and handled: so they are handled in the order in which they come."""
        self.lost = False
        """The other end is gone: what is queued goes nowhere."""
        self.early: list[Message] = []
        """What came before anybody read regularly."""
        self.due = False
        """What is queued is to leave with what is sent next."""
        self.handling: Message | None = None
        """The message that is being handled. Who holds :attr:`reading` and finds one comes after an interrupt."""
        self.unhandled = False
        """There are messages to handle."""
        self._out: deque[tuple[bytes, io.FileIO | None]] = deque()
        self._next_out = iter(self._out.popleft, None)
        self._sending = threading.Lock()
        """Held by who sends: nobody else takes from the queue, or uses the next three."""
        self._front = b""
        """What is being sent: the first messages of the queue."""
        self._parts = 0
        """How many of them are in the queue yet."""
        self._at = 0
        """How many of its bytes are sent."""
        self._pulls = map(sock.recvmsg, repeat(_RECEIVE), repeat(_FDS))
        self._came: Any = None
        """What the kernel gave last, until it is cut into messages."""
        self._messages: Iterator[Message] = iter(())
        self._rest: Rest = NOTHING
        self._fds: list[int] = []
        """Descriptors of messages that were not handled, or are not complete."""

    def queue(self, frame: bytes, fd: int | None = None) -> None:
        """Put a message behind the others; :meth:`flush` sends it. ``fd`` goes with it, and stays the caller's."""
        self._out.append((frame, None if fd is None else io.FileIO(os.dup(fd))))

    @property
    def pending(self) -> bool:
        """Something waits to be sent."""
        return bool(self._out)

    def flush(self, *, patience: float = 0.0) -> bool:
        """Send what the socket takes; false if some is left because the peer does not read.

        :param patience: seconds to wait for another thread that is sending; false if it still is after that.
        """
        while self._out and not self.lost:
            # Whoever holds the lock looks again after it has let it go, so that nothing is left behind.
            if self._sending.locked() and not (patience and self._let_go_within(patience)):
                return not patience

            with self._sending:  # and no acquire(): an interrupt after it would leave it locked
                try:
                    if not self._send():
                        return False
                except OSError:
                    self.lost = True  # the reading side says so to everybody

        return True

    def _let_go_within(self, seconds: float) -> bool:
        got: list[bool] = []
        try:
            got.extend(map(self._sending.acquire, (True,), (seconds,)))
            return got == [True]
        finally:
            if got == [True]:
                self._sending.release()

    def _send(self) -> bool:
        out = self._out
        while out:
            front, fd = out[0]
            if self._parts:
                front = self._front
            else:
                if fd is None and len(out) > 1:
                    self._join()
                    continue

                self._front, self._at, self._parts = front, 0, 1

            size, at = len(front), self._at
            if at < size:
                try:
                    if fd is not None and not at:
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.fileno()]))]
                        for sent in map(self.socket.sendmsg, ([front],), (rights,)):
                            self._at += sent
                    else:
                        for sent in map(self.socket.send, (memoryview(front)[at:] if at else front,)):
                            self._at += sent
                except BlockingIOError:
                    return False

                if self._at < size:
                    continue

            if fd is not None:
                fd.close()

            while self._parts:
                for _ in self._next_out:
                    self._parts -= 1
                    break

        return True

    def _join(self) -> None:
        """Join the first messages, so that one call sends them."""
        parts: list[bytes] = []
        size = 0
        while size < _TOGETHER and len(parts) < len(self._out):
            part, fd = self._out[len(parts)]
            if fd is not None:
                break

            parts.append(part)
            size += len(part)

        joined, number = b"".join(parts), len(parts)
        self._front, self._at, self._parts = joined, 0, number

    def receive(self) -> list[Message] | None:
        """The messages that have come; None if the peer's end is closed."""
        if self.pull() is False:
            return None

        messages = list(self.messages())
        self.unhandled = False
        return messages

    def messages(self) -> Iterator[Message]:
        """Those that are to be handled. Whoever has taken them all says so by :attr:`unhandled`."""
        return self._messages

    def pull(self) -> bool | None:
        """Take in some of what has come. False at the end of the stream, None if there is nothing to read now."""
        if self.unhandled:
            return True

        if self._came is None:
            try:
                for self._came in self._pulls:  # noqa: B020 - an attribute
                    break
            except BlockingIOError:
                return None
            except OSError:
                # If it is closed on this side, that says nothing of the other one.
                return None if self.socket.fileno() < 0 else False

        came: Any = self._came
        data, ancillary, flags, _ = came
        if data == b"":
            return False  # and stays so

        fds = self._fds
        if ancillary or flags & _TRUNCATED:
            fds = fds + _descriptors(ancillary, flags)

        messages, rest = cut(self._rest, data)
        unhandled, them = bool(messages), iter(messages)
        self._rest, self._fds, self._came = rest, fds, None
        self._messages, self.unhandled = them, unhandled
        return True

    def take_fd(self) -> int:
        """The descriptor that came with the message now being read; the caller closes it.

        It is :data:`LOST` where this process had no room for it.
        """
        return self._fds.pop(0)

    def close(self, patience: float = 1.0) -> None:
        """Close the socket, and descriptors that nobody took.

        :param patience: seconds for a thread that is in the midst of a call to the socket. Its number may be that of
            another connection as soon as it is closed, and what is read or sent then would be that one's.
        """
        self.lost = True
        held = [lock for lock in (self.reading, self._sending) if lock.acquire(timeout=patience)]
        try:
            self.socket.close()
            fds, came, self._fds, self._came = self._fds, self._came, [], None
            for fd in fds if came is None else fds + _descriptors(came[1], came[2]):
                if fd != LOST:
                    os.close(fd)

            while self._out:
                _, queued = self._out.popleft()
                if queued is not None:
                    queued.close()
        finally:
            for lock in held:
                lock.release()


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]], flags: int) -> list[int]:
    """Those that came with some bytes."""
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])

    return [*fds, LOST] if flags & _TRUNCATED else list(fds)  # each comes alone: see _send()
