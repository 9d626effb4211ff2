"""The holder's connection to the process that made its promise. As long as it stands, the holder has the right to set.

When the holder's process ends, the kernel closes it, and the maker knows. So nothing here closes it while the
interpreter ends: the maker shall see the end of the process itself, and how it ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from dtorch_core._text import seconds
from dtorch_core.errors import DtorchError, PeerLostError, ProtocolError, StoreTimeoutError
from dtorch_file_store.processes import is_alive
from dtorch_file_store.promise_packets import limit_waits, new_socket, parse, peer_of, receive, send
from dtorch_file_store.wire import Message, frame

_lines: weakref.WeakSet[Line] = weakref.WeakSet()


class Ticket(NamedTuple):
    """What travels in a token."""

    label: str
    """Of the promise."""
    host: str
    """The maker's, as :func:`here` gives it."""
    pid: int
    """The maker's."""
    address: str
    """Its server's; empty if the future was cancelled: nobody waits for this promise."""
    secret: str


class Line:
    """Thread-safe. An outcome is sent once, and closes it."""

    def __init__(self, sock: socket.socket, cancelled: bool) -> None:
        """
        :param sock: connected; this takes it over.
        """
        # A socket object would close itself, and complain, when the interpreter ends.
        self._fd = sock.detach()
        self._cancelled = cancelled
        self._lock = threading.RLock()  # a signal handler may ask in the midst of a question
        _lines.add(self)

    def cancelled(self) -> bool:
        """Whether the future was cancelled, or its process is gone; looks, and does not wait."""
        with self._lock:
            if self._fd >= 0 and not self._cancelled:
                with self._socket() as sock:
                    received = receive(sock)

                # All that ever comes is the news that it was cancelled, or the end.
                self._cancelled = received is not None

            return self._cancelled

    def send(self, packet: bytes, fd: int | None = None) -> bool:
        """Send the last packet, and close; false if nobody waits for it any more."""
        with self._lock:
            if self._fd < 0:
                return False

            sent = self.say(packet, fd)
            self.close()
            return sent

    def say(self, packet: bytes, fd: int | None = None) -> bool:
        """Send a packet that is not the last; false if nobody waits for it any more."""
        with self._lock:
            sent = False
            with self._socket() as sock, contextlib.suppress(ConnectionError):
                send(sock, packet, fd)
                sent = True

            self._cancelled = self._cancelled or not sent
            return sent

    def answer(self, timeout: float) -> Message | None:
        """Wait for what the maker says; None if it is gone, or says nothing in time."""
        with self._lock, self._socket() as sock:
            limit_waits(sock, timeout)
            received = receive(sock, 0)

        return parse(received[0]) if received is not None and received[0] else None

    def part(self) -> Line:
        """The connection for somebody else; this one is closed then, and keeps what it knows."""
        with self._lock, self._socket() as sock:
            other, self._fd = Line(sock, self._cancelled), -1
            return other

    def close(self) -> None:
        """The maker then takes the promise for broken, unless something was sent."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, self._fd)
        try:
            yield sock
        finally:
            sock.detach()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def here() -> str:
    """Where an abstract socket is found: this machine, seen from the same containers."""
    from dtorch_core._meeting.member import host

    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = "-"

    return f"{host()}/{network}"


def connect(ticket: Ticket, timeout: float) -> Line:
    """Take the right to set.

    :raises ProtocolError: if somebody has it already, or it was made on another host or by another user.
    :raises PeerLostError: if the process that made the promise is gone.
    :raises StoreTimeoutError: if that process does not answer.
    """
    who = f"attach_promise of {ticket.label}"
    if ticket.host != here():
        raise ProtocolError(
            f"{who}: it was made on another host or in another container ({ticket.host}), and this is {here()}; the "
            f"file backend reaches the processes of one"
        )

    try:
        sock = new_socket()
    except OSError as error:
        raise DtorchError(f"{who}: no socket can be made: {error.strerror}") from error

    with sock:
        limit_waits(sock, timeout)
        try:
            sock.connect("\0" + ticket.address)
            _, uid = peer_of(sock)
            if uid != os.geteuid():
                raise ProtocolError(
                    f"{who}: it was made by the user with id {uid}, and this process is of {os.geteuid()}; a promise "
                    f"is handed over between processes of one user"
                )

            with contextlib.suppress(ConnectionError):  # it may have refused already, and said why
                send(sock, frame("hello", ticket.secret))

            received = receive(sock, 0)
        except BlockingIOError:
            received = None
        except ConnectionError:
            received = b"", []

        if received is None:
            raise StoreTimeoutError(
                f"{who}: pid {ticket.pid}, which made it, has not answered for {seconds(timeout)}; it may be stopped"
            )

        if not received[0]:
            raise _nobody(who, ticket.pid)

        answer = parse(received[0])
        if answer.kind != "yours":
            raise ProtocolError(f"{who}: {answer.fields[0]}")

        return Line(sock, bool(answer.fields[0]))


def _nobody(who: str, pid: int) -> DtorchError:
    """Nobody listens at the address: the process is gone, or has no promise that waits."""
    if is_alive(pid):
        return ProtocolError(
            f"{who}: pid {pid}, which made it, waits for none any more: somebody has attached it already, and the "
            f"right to set is handed over once"
        )

    return PeerLostError(f"{who}: pid {pid}, which made it, is gone, and its future with it: nobody waits for a result")


def _forked() -> None:
    # The connection is the parent's, and has to end when it does.
    for line in list(_lines):
        line._lock = threading.RLock()
        line.close()


os.register_at_fork(after_in_child=_forked)
