"""Where holders in other processes bring the outcomes of this process's promises.

There is one server in a process while a promise is out there, with one thread, which sleeps until something comes; the
callbacks of a future that ends here run in it. Its socket has an abstract name, so that no file can be left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from dtorch_core._promise_slot import Slot
from dtorch_core.errors import BrokenPromiseError, DtorchError
from dtorch_core.future import Outcome
from dtorch_file_store.processes import how_it_ended
from dtorch_file_store.promise_cuda import KINDS, Arrival
from dtorch_file_store.promise_packets import new_socket, parse, peer_of, receive, send, unpack
from dtorch_file_store.wire import Message, frame

_BACKLOG = 4096
_LINGER = 0.1
"""Seconds that a server without a promise is kept: to start its thread costs more than all else that a promise does."""

_LAST = 1.0
"""Seconds that the end of the process waits for the thread: it may be in somebody's callback."""

_lock = threading.RLock()
"""Of the servers' coming and going: held for a few lines, never across a call that waits. A collector or a signal
handler may come back to it in the midst of them."""

_current: Server | None = None
_servers: weakref.WeakSet[Server] = weakref.WeakSet()


class _Line:
    """A connection to another process, and the promise that it holds the right to set."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.socket = sock
        self.pid = pid
        self.slot: Slot | None = None


class Server:
    """Gives the right to set to whoever brings the secret, once, and ends the future as the holder does."""

    def __init__(self) -> None:
        """
        :raises DtorchError: if no socket can be made.
        """
        self.address = f"dtorch-promise-{secrets.token_hex(8)}"
        self.closed = False
        self._stopping = False
        self._waiting: dict[str, Slot] = {}
        """By secret: nobody has the right to set."""
        self._lines: dict[int, _Line] = {}
        """By descriptor."""
        self._held: set[_Line] = set()
        """Those over whose other end somebody has the right to set."""
        self._cancelled: deque[_Line] = deque()
        self._spare = self._bell = -1
        self._thread = threading.Thread(target=self._run, name="dtorch promises", daemon=True)
        try:
            self._listener = new_socket()
            self._selector = selectors.DefaultSelector()
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._listener.bind("\0" + self.address)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._let_go()
            raise DtorchError(f"a promise can't be handed over: no socket can be made: {error.strerror}") from error

        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, self._hear)
        _servers.add(self)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def offer(self, slot: Slot) -> str:
        """The secret for which the right to set is given away. With the lock held, and not when it is closed."""
        secret = secrets.token_hex(16)
        self._waiting[secret] = slot
        return secret

    def claim(self, secret: str) -> Slot | None:
        """The right to set, for a holder in this very process; None if it does not wait here."""
        slot = self._waiting.pop(secret, None)
        if slot is not None:
            self._ring()

        return slot

    def stop(self) -> None:
        """The process ends: nobody is told. Returns when the thread has ended, or is busy elsewhere."""
        self._stopping = True
        self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST)

    def forget(self) -> None:
        """In a forked child: the connections are the parent's, and have to end when it does."""
        self.closed = True
        self._let_go()

    def _ring(self) -> None:
        with _lock:
            if not self.closed:
                os.eventfd_write(self._bell, 1)

    # The thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                idle = not self._waiting and not self._held
                events = self._selector.select(_LINGER if idle else None)
                for key, _ in events:
                    key.data()

                if idle and not events and self._over():
                    break
        finally:
            with _lock:
                self.closed = True

            self._let_go()
            left = [*self._waiting.values(), *(line.slot for line in self._held)]
            self._waiting.clear()
            for slot in left:
                if slot is not None and not self._stopping:
                    _settle(slot, Outcome(error=BrokenPromiseError(f"{slot.label}: the thread that serves it failed")))

    def _over(self) -> bool:
        """Nothing has come back meanwhile. From then on this server takes no promise."""
        global _current
        with _lock:
            self.closed = True  # first: what comes back to the lock amid these lines goes to another server
            if self._waiting:
                self.closed = False
            elif _current is self:
                _current = None

            return self.closed

    def _let_go(self) -> None:
        for line in self._lines.values():
            line.socket.close()

        for closable in (getattr(self, "_selector", None), getattr(self, "_listener", None)):
            if closable is not None:
                closable.close()

        for fd in (self._bell, self._spare):
            if fd >= 0:
                os.close(fd)

        self._bell = self._spare = -1

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                return self._turn_away(error)

            pid, uid = peer_of(sock)
            if uid != os.geteuid():
                self._refuse(
                    _Line(sock, pid),
                    f"pid {os.getpid()} is of the user with id {os.geteuid()}, and this process is of {uid}; a promise "
                    f"is handed over between processes of one user",
                )
                continue

            line = self._lines[sock.fileno()] = _Line(sock, pid)
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read, line))
            self._read(line)  # what it wants is mostly there by now

    def _turn_away(self, error: OSError) -> None:
        """There is no descriptor for who connects. With the spare one it is told so: it would wait for ever."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

        with contextlib.suppress(OSError):  # another thread may take it in between; then who connects waits a little
            sock, _ = self._listener.accept()
            self._refuse(_Line(sock, 0), f"pid {os.getpid()}, which made it, can't accept it: {error.strerror}")

        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _hear(self) -> None:
        os.eventfd_read(self._bell)
        while self._cancelled:
            self._call_off(self._cancelled.popleft())

    def _read(self, line: _Line) -> None:
        """All that has come."""
        while self._lines.get(line.socket.fileno()) is line:
            received = receive(line.socket)
            if received is None:
                return

            packet, fds = received
            try:
                if packet:
                    self._take(line, packet, fds)
                else:
                    self._end(line, f"its holder, pid {line.pid}, {how_it_ended(line.pid)}")
            finally:
                for fd in fds:
                    os.close(fd)

    def _take(self, line: _Line, packet: bytes, fds: list[int]) -> None:
        try:
            message = parse(packet)
            if line.slot is None:
                (secret,) = message.fields if message.kind == "hello" else ("",)
                self._attach(line, str(secret))
            elif message.kind == "handed over":
                (secret,) = message.fields
                self._waiting[str(secret)] = line.slot
                self._close(line)
            else:
                self._bring(line, message, fds)
        except Exception as error:
            self._end(line, f"what its holder, pid {line.pid}, sent can't be read: {error}")

    def _attach(self, line: _Line, secret: str) -> None:
        slot = self._waiting.pop(secret, None)
        if slot is None:
            # Who handed it on has said so before the token was anywhere; perhaps nobody has read that yet.
            for other in list(self._held):
                self._read(other)

            slot = self._waiting.pop(secret, None)

        if slot is None:
            self._refuse(
                line,
                f"no promise of pid {os.getpid()} waits for this token: somebody has attached it already, and the "
                f"right to set is handed over once",
            )
            return

        cancelled = slot.cancelled()
        with contextlib.suppress(OSError):  # it is gone: the end that is read next says so
            send(line.socket, frame("yours", cancelled))

        if cancelled:
            self._close(line)
            return

        line.slot = slot
        self._held.add(line)
        slot.when_over(partial(_over, weakref.ref(self), weakref.ref(line)))

    def _bring(self, line: _Line, message: Message, fds: list[int]) -> None:
        if message.kind in KINDS:
            self._begin(line, message, fds)
            return

        outcome = unpack(message, fds, f"pid {line.pid}")
        _settle(self._close(line), outcome)

    def _begin(self, line: _Line, message: Message, fds: list[int]) -> None:
        """A value from the GPU: what is left to do may block, and is another thread's."""
        slot = self._part(line)
        assert slot is not None, "who brings something has attached it"
        taken = list(fds)
        fds.clear()
        Arrival(slot.label, line.socket, line.pid, message, taken, partial(_settle, slot)).begin()

    def _call_off(self, line: _Line) -> None:
        """Tell the holder that nobody waits. What it sent before still counts: it may have handed it on."""
        if line.slot is None:
            return

        with contextlib.suppress(OSError):  # it is gone
            send(line.socket, frame("cancelled"))
            line.socket.shutdown(socket.SHUT_RD)

        self._read(line)

    def _end(self, line: _Line, why: str) -> None:
        if line.slot is None:
            self._close(line)
        else:
            error = BrokenPromiseError(f"{line.slot.label}: {why}")
            _settle(self._close(line), Outcome(error=error))

    def _refuse(self, line: _Line, why: str) -> None:
        with contextlib.suppress(OSError):  # it did not wait for the answer
            send(line.socket, frame("refused", why))

        self._close(line)

    def _close(self, line: _Line) -> Slot | None:
        """What its holder had the right to set."""
        slot = self._part(line)
        line.socket.close()
        return slot

    def _part(self, line: _Line) -> Slot | None:
        """As :meth:`_close`, but the connection stays open, and is the caller's."""
        if self._lines.pop(line.socket.fileno(), None) is not None:
            self._selector.unregister(line.socket)

        self._held.discard(line)
        slot, line.slot = line.slot, None
        return slot

    def post(self, line: _Line) -> None:
        """The future of the promise on this line was cancelled."""
        self._cancelled.append(line)
        self._ring()


def offer(slot: Slot) -> tuple[str, str]:
    """Let a holder in another process set this: the address to connect to, and the secret to bring.

    :raises DtorchError: if no socket or thread can be made.
    """
    global _current
    while True:
        with _lock:
            server = _current
            if server is not None and not server.closed:
                return server.address, server.offer(slot)

        new = Server()
        with _lock:
            if _current is not None and not _current.closed:
                new.forget()  # another thread was faster
                continue

            address, secret = new.address, new.offer(slot)
            _current = new

        try:
            new.start()
        except RuntimeError as error:
            with _lock:
                _current = None if _current is new else _current

            new.forget()
            raise DtorchError(f"{slot.label} can't be handed over: no thread can be started: {error}") from error

        return address, secret


def claim(address: str, secret: str) -> Slot | None:
    """The right to set a promise that waits in this process; None if it does not, or the address is of another one."""
    server = _current
    return server.claim(secret) if server is not None and server.address == address else None


def _over(server: weakref.ref[Server], line: weakref.ref[_Line], future: Future[Tensor | None]) -> None:
    """A future has ended, by whomever; its holder has to know only of one that was cancelled."""
    found, held = server(), line()
    if found is not None and held is not None and held.slot is not None and future.cancelled():
        found.post(held)


def _settle(slot: Slot | None, outcome: Outcome) -> None:
    try:
        if slot is not None:
            slot.settle(outcome)
    except BaseException:  # somebody's callback; it must not take the other promises with it
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _forked() -> None:
    global _current, _lock
    _lock, _current = threading.RLock(), None
    for server in list(_servers):
        server.forget()


def _stop_all() -> None:
    for server in list(_servers):
        if not server.closed:
            server.stop()


os.register_at_fork(after_in_child=_forked)
atexit.register(_stop_all)
