"""Brings the processes of an opening together: each listens at a socket of its own, and is connected to every other."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

from dtorch_core import BackendContext, DtorchError, PeerLostError, StoreTimeoutError, Topology
from dtorch_core._text import rank_list, seconds
from dtorch_file_store.directory import SessionDirectory
from dtorch_file_store.link import Link, ready
from dtorch_file_store.node import Node
from dtorch_file_store.session import Session
from dtorch_file_store.wire import frame

_CREDENTIALS = struct.Struct("3i")
_UP = "up"
_HELLO, _FAILED = "hello", "failed"

HELLO = 5.0
"""Seconds that whoever connects has to say who it is."""

_lock = threading.Lock()
_joined: dict[tuple[str, int], tuple[Future[Session], int]] = {}
"""The sessions that ranks of this process are opening now: by token and node, and how many have still to come."""


def homes_of(topology: Topology) -> list[int]:
    """The node of each rank: one for each process."""
    processes = list(topology.by_process())
    return [processes.index(member.process) for member in topology]


def join(ctx: BackendContext) -> Session:
    """The session of this opening in this process. The first of its ranks to come makes it; the others wait for that.

    :raises StoreTimeoutError: if another process does not come in time.
    :raises DtorchError: if a process can't take part, on every rank; it says why.
    """
    deadline = time.monotonic() + ctx.timeout
    token = ctx.rendezvous.compare_set("session", "", uuid.uuid4().hex).decode()
    homes = homes_of(ctx.topology)
    index = homes[ctx.rank]
    with _lock:
        future, left = _joined.pop((token, index), (None, homes.count(index)))
        first = future is None
        if future is None:
            future = Future()

        if left > 1:
            _joined[token, index] = future, left - 1

    if first:
        try:
            future.set_result(_make(ctx, token, homes, index, deadline))
        except BaseException as error:
            future.set_exception(error)

    try:
        return future.result(max(0.0, deadline - time.monotonic()) + 1.0)
    finally:
        with _lock:
            if future.done() and future.exception() is not None:
                _joined.pop((token, index), None)


def _make(ctx: BackendContext, token: str, homes: Sequence[int], index: int, deadline: float) -> Session:
    nodes = max(homes) + 1
    pids = [member.pid for member in ctx.topology]
    node = Node(ctx.label, index, homes, pids)
    session = Session(node, ctx.topology)
    if nodes == 1:
        node.connect([])
        return session

    meeting = _Meeting(ctx, token, homes, index, pids, deadline)
    try:
        node.connect(meeting.links())
    except BaseException:
        meeting.close()
        node.close()
        session.let_go()
        raise

    node.on_end = meeting.close
    return session


class _Meeting:
    """One node's way to the others."""

    def __init__(
        self, ctx: BackendContext, token: str, homes: Sequence[int], index: int, pids: Sequence[int], deadline: float
    ) -> None:
        self._ctx, self._token, self._homes, self._index, self._pids = ctx, token, homes, index, pids
        self._deadline = deadline
        self._nodes = max(homes) + 1
        self._directory: SessionDirectory | None = None

    def links(self) -> list[Link]:
        """Connect with every other node."""
        about = {
            "name": self._ctx.name,
            "ranks": [rank for rank, home in enumerate(self._homes) if home == self._index],
            "world_size": self._ctx.world_size,
        }
        try:
            self._directory = SessionDirectory(self._token, self._index, about)
        except BaseException as error:
            self._tell(error)
            raise

        path = self._directory.socket_path(self._index)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        links: list[Link] = []
        try:
            listener.bind(path)
            listener.listen(self._nodes)
            self._ctx.rendezvous.set(f"{_UP}/{self._index}", "")
            for other in range(self._nodes):
                self._await(other)

            hello = frame(_HELLO, self._token, self._index, "")
            for other in range(self._index):
                links.append(self._connect(other, hello))

            links += self._accept(listener, range(self._index + 1, self._nodes))
        except BaseException as error:
            self._tell(error)  # before nobody listens here any more: who finds that looks for the reason
            for link in links:
                link.close()

            raise
        finally:
            listener.close()
            if os.path.exists(path):
                os.unlink(path)

        return links

    def _tell(self, error: BaseException) -> None:
        """Tell those that wait for this node: for its word at the rendezvous, or for its connection."""
        text = f"{type(error).__name__}: {error}"
        self._ctx.rendezvous.set(f"{_UP}/{self._index}", text)
        for other in range(self._index):
            with contextlib.suppress(DtorchError):  # it has given up itself, or has us already
                self._connect(other, frame(_FAILED, self._token, self._index, text)).close()

    def close(self) -> None:
        """Nothing is left of this process in the session's directory, nor of those that have died."""
        if self._directory is not None:
            self._directory.close(range(self._nodes))

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _ranks_at(self, node: int) -> str:
        return rank_list(rank for rank, home in enumerate(self._homes) if home == node)

    def _pid_of(self, node: int) -> int:
        return self._pids[self._homes.index(node)]

    def _late(self, nodes: Sequence[int]) -> StoreTimeoutError:
        ranks = rank_list(rank for rank, home in enumerate(self._homes) if home in nodes)
        return StoreTimeoutError(
            f"{self._ctx.label}, rank {self._ctx.rank}: {ranks} had not come to the session after "
            f"{seconds(self._ctx.timeout)}"
        )

    def _await(self, node: int) -> None:
        key = f"{_UP}/{node}"
        try:
            self._ctx.rendezvous.wait([key], timedelta(seconds=self._left()))
        except RuntimeError as error:  # c10d's DistStoreError is one
            raise self._late([node]) from error

        self._check_takes_part(node)

    def _check_takes_part(self, node: int) -> None:
        """:raises DtorchError: if a node that has come to the rendezvous says that it can't."""
        key = f"{_UP}/{node}"
        failure = self._ctx.rendezvous.get(key).decode() if self._ctx.rendezvous.check([key]) else ""
        if failure:
            raise DtorchError(f"{self._ctx.label}: {self._ranks_at(node)} can't take part: {failure}")

    def _connect(self, node: int, word: bytes) -> Link:
        if self._directory is None:
            raise DtorchError(f"{self._ctx.label}: this process has no folder for the session")

        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.settimeout(self._left())
            line.connect(self._directory.socket_path(node))
            self._check_peer(line, node)
            line.sendall(word)
        except OSError as error:
            line.close()
            self._check_takes_part(node)
            raise PeerLostError(
                f"{self._ctx.label}: {self._ranks_at(node)} (pid {self._pid_of(node)}) can't be reached: {error}"
            ) from error
        except BaseException:
            line.close()
            raise

        return Link(line, node)

    def _accept(self, listener: socket.socket, expected: Sequence[int]) -> list[Link]:
        links: list[Link] = []
        waiting = set(expected)
        pidfds = {_pidfd(self._pid_of(node)): node for node in expected if self._pid_of(node) != os.getpid()}
        pidfds.pop(-1, None)
        try:
            while waiting:
                found = ready([listener.fileno(), *pidfds], self._left())
                if not found:
                    raise self._late(sorted(waiting))

                if listener.fileno() not in found:
                    ended = pidfds[found.pop()]
                    raise PeerLostError(
                        f"{self._ctx.label}: {self._ranks_at(ended)} (pid {self._pid_of(ended)}) ended while it was "
                        f"opened"
                    )

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
            raise DtorchError(f"{self._ctx.label}: {self._ranks_at(link.peer)} can't take part: {failure}")

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


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
