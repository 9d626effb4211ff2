"""Brings the processes of an opening together: each listens at a socket of its own, and is connected to every other."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from dtorch_core import BackendContext, DtorchError, PeerLostError, StoreTimeoutError, Topology
from dtorch_core._meeting.deaths import LONGEST, first_ended
from dtorch_core._text import rank_list, seconds
from dtorch_file_store.directory import SessionDirectory
from dtorch_file_store.link import Link, ready
from dtorch_file_store.node import Node
from dtorch_file_store.places import check_same, described
from dtorch_file_store.session import Session
from dtorch_file_store.wire import frame

T = TypeVar("T")

_CREDENTIALS = struct.Struct("3i")
_HELLO, _FAILED = "hello", "failed"

HELLO = 5.0
"""Seconds that whoever connects has to say who it is."""

TELLING = 1.0
"""Seconds that a node which does not listen any more has to say why."""

HINTS = {
    errno.EMFILE: "; raise the limit (ulimit -n)",
    errno.EAGAIN: "; raise the limit of threads or of memory (ulimit -u, ulimit -v)",
}
"""The way out, by error number."""

_lock = threading.Lock()
_joined: dict[tuple[str, int], tuple[_Meeting, int]] = {}
"""What ranks of this process are opening now: by token and node, and how many have still to come."""


def homes_of(topology: Topology) -> list[int]:
    """The node of each rank: one for each process."""
    processes = list(topology.by_process())
    return [processes.index(member.process) for member in topology]


def join(ctx: BackendContext) -> Session:
    """The session of this opening in this process. The first of its ranks to come makes it; the others wait for that.

    :raises StoreTimeoutError: if another process does not come in time.
    :raises PeerLostError: if another process has ended.
    :raises DtorchError: if a process can't take part, on every rank; it says why.
    """
    homes = homes_of(ctx.topology)
    index = homes[ctx.rank]
    with _lock:
        meeting, left = _joined.pop((ctx.token, index), (None, homes.count(index)))
        first = meeting is None
        if meeting is None:
            meeting = _Meeting(ctx, homes, index)

        if left > 1:
            _joined[ctx.token, index] = meeting, left - 1

    try:
        if first:
            meeting.listen()

        meeting.wait(meeting.listening)
        if max(homes) > 0:
            check_same(f"{ctx.label}, rank {ctx.rank}", ctx.exchange(meeting.place))  # all listen

        if first:
            meeting.connect()

        return meeting.wait(meeting.connected)
    except BaseException as error:
        with _lock:
            _joined.pop((ctx.token, index), None)

        if first:
            meeting.give_up(error)

        raise


class _Meeting:
    """One node's way to the others."""

    def __init__(self, ctx: BackendContext, homes: Sequence[int], index: int) -> None:
        self._ctx, self._token, self._homes, self._index = ctx, ctx.token, homes, index
        self._pids = [member.pid for member in ctx.topology]
        self._deadline = time.monotonic() + ctx.timeout
        self._nodes = max(homes) + 1
        self._directory: SessionDirectory | None = None
        self.place: dict[str, str] = {}
        """The folder in which this node listens, for :func:`check_same`."""
        self._listener: socket.socket | None = None
        self._awaited = False
        """Other nodes may wait for its connection."""
        self._hello = frame(_HELLO, self._token, self._index, "")
        self.listening: Future[None] = Future()
        self.connected: Future[Session] = Future()

    def wait(self, step: Future[T]) -> T:
        """What the first rank of this process has done."""
        return step.result(self._left() + 1.0)

    def listen(self) -> None:
        """From now on other nodes can connect."""
        if self._nodes > 1:
            about = {
                "name": self._ctx.name,
                "ranks": [rank for rank, home in enumerate(self._homes) if home == self._index],
                "world_size": self._ctx.world_size,
            }
            self._directory = SessionDirectory(self._token, self._index, about)
            with self._said("can't listen for other processes"):
                self.place = described(self._directory.base)
                self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._listener.bind(self._directory.socket_path(self._index))
                self._listener.listen(self._nodes)

        self.listening.set_result(None)

    def connect(self) -> None:
        """Make the session, once all nodes listen."""
        self._awaited = True
        with self._said("can't connect with other processes"):
            node = Node(self._ctx.label, self._index, self._homes, self._pids)
            session = Session(node, self._ctx.topology)
            try:
                node.connect([] if self._listener is None else self._links(self._listener))
            except BaseException:
                node.close()
                session.let_go()
                raise

        self._stop_listening()
        node.on_end = self.close
        self.connected.set_result(session)

    def give_up(self, error: BaseException) -> None:
        """The other ranks of this process raise it, too; nothing of the session is left here."""
        for step in (self.listening, self.connected):
            if not step.done():
                step.set_exception(error)

        self._stop_listening()  # which also frees the descriptor that telling takes
        if self._awaited:
            self._tell(error)

        self.close()

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        try:
            yield
        except DtorchError:
            raise
        except OSError as error:
            hint = HINTS.get(error.errno or 0, "")
            # Without its cause, which is all that the others would be told.
            raise DtorchError(
                f"{self._ctx.label}, rank {self._ctx.rank}: {what}: {error.strerror or error}{hint}"
            ) from None

    def _stop_listening(self) -> None:
        if self._listener is not None and self._directory is not None:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._directory.socket_path(self._index))

    def _links(self, listener: socket.socket) -> list[Link]:
        links: list[Link] = []
        try:
            for other in range(self._index):
                links.append(self._connect(other, self._hello))

            return links + self._accept(listener, range(self._index + 1, self._nodes))
        except BaseException:
            for link in links:
                link.close()

            raise

    def _tell(self, error: BaseException) -> None:
        """Tell those that wait for this node's connection. The others learn it from the opening."""
        text = f"{type(error).__name__}: {error}"
        for other in range(self._index):
            with contextlib.suppress(DtorchError, OSError):  # it has given up itself, or has us already
                self._connect(other, frame(_FAILED, self._token, self._index, text)).close()

    def close(self) -> None:
        """Nothing is left of this process in the session's directory, nor of those that have died."""
        if self._directory is not None:
            self._directory.close(range(self._nodes))

    def _left(self) -> float:
        return min(max(0.001, self._deadline - time.monotonic()), LONGEST)

    def _ranks_at(self, node: int) -> str:
        return rank_list(rank for rank, home in enumerate(self._homes) if home == node)

    def _pid_of(self, node: int) -> int:
        return self._pids[self._homes.index(node)]

    def _lost(self, node: int) -> PeerLostError:
        return PeerLostError(
            f"{self._ctx.label}: {self._ranks_at(node)} (pid {self._pid_of(node)}) ended while it was opened"
        )

    def _pidfd(self, node: int) -> dict[int, int]:
        """A descriptor that tells the end of a node's process, if the kernel gives one."""
        try:
            return {os.pidfd_open(self._pid_of(node)): node}
        except ProcessLookupError:
            raise self._lost(node) from None  # see _said()
        except OSError:
            return {}

    def _late(self, nodes: Sequence[int]) -> StoreTimeoutError:
        ranks = rank_list(rank for rank, home in enumerate(self._homes) if home in nodes)
        return StoreTimeoutError(
            f"{self._ctx.label}, rank {self._ctx.rank}: {ranks} had not come to the session after "
            f"{seconds(self._ctx.timeout)}"
        )

    def _check_alive(self, node: int) -> None:
        """:raises PeerLostError: if a node that does not listen any more has ended, or is about to."""
        members = [member for member, home in zip(self._ctx.topology, self._homes, strict=True) if home == node]
        if self._pid_of(node) != os.getpid() and first_ended({self._pid_of(node): tuple(members)}):
            raise self._lost(node)

    def _failed(self, node: int, why: str) -> DtorchError:
        kind = PeerLostError if why.startswith(f"{PeerLostError.__name__}: ") else DtorchError
        return kind(f"{self._ctx.label}: {self._ranks_at(node)} can't take part: {why}")

    def _connect(self, node: int, word: bytes) -> Link:
        if self._directory is None:
            raise DtorchError(f"{self._ctx.label}: this process has no folder for the session")

        line, why = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), None
        try:
            line.settimeout(self._left())
            line.connect(self._directory.socket_path(node))
            self._check_peer(line, node)
            line.sendall(word)
        except OSError as error:
            line.close()
            why = str(error)  # raised below: see _said()
        except BaseException:
            line.close()
            raise

        if why is not None:
            self._check_alive(node)
            failure = self._ctx.failure(TELLING) if word == self._hello else None
            raise failure or PeerLostError(
                f"{self._ctx.label}: {self._ranks_at(node)} (pid {self._pid_of(node)}) can't be reached: {why}"
            )

        return Link(line, node)

    def _accept(self, listener: socket.socket, expected: Sequence[int]) -> list[Link]:
        links: list[Link] = []
        waiting = set(expected)
        pidfds: dict[int, int] = {}
        try:
            for node in expected:
                if self._pid_of(node) != os.getpid():
                    pidfds.update(self._pidfd(node))

            while waiting:
                found = ready([listener.fileno(), *pidfds], self._left())
                if not found:
                    raise self._late(sorted(waiting))

                if listener.fileno() not in found:
                    raise self._lost(pidfds[found.pop()])

                line, _ = listener.accept()
                link = Link(line, -1)
                if self._greets(link) and link.peer in waiting:
                    waiting.discard(link.peer)
                    links.append(link)
                else:
                    link.close()  # a stranger, and descriptors that it may have sent
        except BaseException:
            for link in links:
                link.close()

            raise
        finally:
            for fd in pidfds:
                os.close(fd)

        return links

    def _greets(self, link: Link) -> bool:
        """Whether a node of this session is at the other end; the link is then told which one.

        :raises DtorchError: if it says that it can't take part; the link is closed.
        """
        line, deadline = link.socket, min(self._deadline, time.monotonic() + HELLO)
        try:
            if _peer_of(line)[1] != os.getuid():
                return False  # not a byte of it is read

            while not link.early and ready([line.fileno()], deadline - time.monotonic()):
                messages = link.receive()
                if messages is None:
                    return False

                link.early += messages

            # It may have begun to work already: what follows is for the session.
            hello = link.early.pop(0)
            token, link.peer, failure = hello.fields
            if hello.kind not in (_HELLO, _FAILED) or token != self._token or link.peer not in range(self._nodes):
                return False

            self._check_peer(line, link.peer)
        except (OSError, ValueError, TypeError, EOFError, LookupError, DtorchError):
            return False

        if failure:
            link.close()
            raise self._failed(link.peer, failure)

        return True

    def _check_peer(self, line: socket.socket, node: int) -> None:
        """:raises DtorchError: if the other end is another user's, or not the process that it should be."""
        pid, user = _peer_of(line)
        if user != os.getuid() or pid != self._pid_of(node):
            raise DtorchError(
                f"{self._ctx.label}: the process at the other end is pid {pid} of user {user}, not pid "
                f"{self._pid_of(node)} of user {os.getuid()}, which {self._ranks_at(node)} should be"
            )


def _peer_of(line: socket.socket) -> tuple[int, int]:
    """The process at the other end, and its user, as the kernel knows them."""
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user
