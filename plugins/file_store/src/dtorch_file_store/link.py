"""The connection to one other process of a session: messages in order, descriptors with them, never a blocking send."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable

from dtorch_core._meeting.deaths import LONGEST
from dtorch_core.errors import DtorchError
from dtorch_file_store.wire import Message, Reader

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
        self._out: deque[tuple[bytes | memoryview, int | None]] = deque()
        self._sending = threading.Lock()
        self._reader = Reader()
        self._fds: deque[int] = deque()

    def queue(self, frame: bytes, fd: int | None = None) -> None:
        """Put a message behind the others; :meth:`flush` sends it. ``fd`` goes with it, and stays the caller's."""
        self._out.append((frame, None if fd is None else os.dup(fd)))

    @property
    def pending(self) -> bool:
        """Something waits to be sent."""
        return bool(self._out)

    def flush(self, *, last: bool = False) -> bool:
        """Send what the socket takes; false if some is left because the peer does not read.

        :param last: wait for another thread that is sending.
        """
        while self._out and not self.lost:
            # Whoever holds the lock looks again after it has let it go, so that nothing is left behind.
            if not self._sending.acquire(last):
                return True

            try:
                if not self._send():
                    return False
            except OSError:
                self.lost = True  # the reading side says so to everybody
            finally:
                self._sending.release()

        return True

    def _send(self) -> bool:
        while self._out:
            data, fd = self._out[0]
            if fd is None and len(self._out) > 1:
                data = self._gather()

            try:
                if fd is None:
                    sent = self.socket.send(data)
                else:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                    sent = self.socket.sendmsg([data], rights)
            except BlockingIOError:
                return False

            if fd is not None:
                os.close(fd)

            if sent < len(data):
                self._out[0] = (memoryview(data)[sent:], None)
            else:
                self._out.popleft()

        return True

    def _gather(self) -> bytes | memoryview:
        """Join the first messages, so that one call sends them. Only the sender takes from the queue."""
        parts, size = [], 0
        while self._out and size < _TOGETHER and self._out[0][1] is None:
            parts.append(self._out.popleft()[0])
            size += len(parts[-1])

        joined = parts[0] if len(parts) == 1 else b"".join(parts)
        self._out.appendleft((joined, None))
        return joined

    def receive(self) -> list[Message] | None:
        """The messages that have come; None if the peer's end is closed."""
        data = self._pull()
        return None if data == b"" else self._reader.feed(data) if data else []

    def last_words(self) -> list[Message]:
        """All that the peer sent before its process ended."""
        words: list[Message] = []
        while data := self._pull():
            words += self._reader.feed(data)

        return words

    def _pull(self) -> bytes | None:
        """Some bytes; none at the end of the stream, None if there is nothing to read now."""
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(_RECEIVE, _FDS)
        except BlockingIOError:
            return None
        except OSError:
            return None if self.socket.fileno() < 0 else b""  # closed on this side: that says nothing of the other one

        if ancillary or flags & _TRUNCATED:
            self._keep(ancillary, flags)

        return data

    def _keep(self, ancillary: Iterable[tuple[int, int, bytes]], flags: int) -> None:
        """Put the descriptors that came with some bytes behind the others."""
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)

        if flags & _TRUNCATED:
            self._fds.append(LOST)  # each comes alone: see _send()

    def take_fd(self) -> int:
        """The descriptor that came with the message now being read; the caller closes it.

        It is :data:`LOST` where this process had no room for it.
        """
        return self._fds.popleft()

    def close(self, patience: float = 1.0) -> None:
        """Close the socket, and descriptors that nobody took.

        :param patience: seconds for a thread that is in the midst of a call to the socket. Its number may be that of
            another connection as soon as it is closed, and what is read or sent then would be that one's.
        """
        self.lost = True
        held = [lock for lock in (self.reading, self._sending) if lock.acquire(timeout=patience)]
        try:
            self.socket.close()
            while self._fds:
                taken = self._fds.popleft()
                if taken != LOST:
                    os.close(taken)

            while self._out:
                _, fd = self._out.popleft()
                if fd is not None:
                    os.close(fd)
        finally:
            for lock in held:
                lock.release()
