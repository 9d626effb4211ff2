"""What the ranks of one process share in one opening, and how an opening ends."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

from dtorch_core import Topology
from dtorch_core.errors import AbortedError, DtorchError, ProtocolError
from dtorch_core.presence import Failure, settle
from dtorch_file_store.arena import Arena, Mapping, Segment
from dtorch_file_store.gates import Gate
from dtorch_file_store.gpu import Gpu
from dtorch_file_store.gpu_values import MappedGpuValue, UploadedValue
from dtorch_file_store.joint import Joint
from dtorch_file_store.keys import Keys
from dtorch_file_store.letters import Letters
from dtorch_file_store.link import LOST, lost
from dtorch_file_store.node import LINGER, Node
from dtorch_file_store.tensors import Layout
from dtorch_file_store.values import ArrivedValue, MappedValue, Value
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame

SETTLING = 0.05
"""Seconds that survivors of a death wait for what others said before: one may be stopped."""

_alive: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """Keys, gates and shared memory of this process's ranks."""

    def __init__(self, node: Node, topology: Topology) -> None:
        self.node = node
        self.presence = node.presence
        self.arena = Arena(node.presence.label, self._announce)
        self.gpu = Gpu(node, self.arena, topology)
        self._reset = Gate("reset", node)
        self.keys = Keys(node, self._arrived, self._reset.standing)
        self.joint = Joint(node, self.arena, self.mapping, self.gpu)
        self.letters = Letters(node, self._arrived)
        self.letters.ended = self.joint.ends.begins_none
        self._barrier = Gate("barrier", node, elsewhere=self._reset.standing)
        self._reset.on_opening, self._reset.on_coming = self._drop, self._give_up
        self._barrier.on_coming = self._give_up
        self._segments: dict[tuple[int, int], tuple[int, int] | Mapping] = {}
        self._mapping = threading.Lock()
        self._ending = False
        self._said_all: set[int] = set()
        self._interrupted = False
        """A rank's goodbye was."""
        self._timer: threading.Timer | None = None
        node.on_lost, node.on_gone, node.on_dead = self._end, self._node_gone, self.gpu.release
        node.on_torn = self._torn
        for kind in ("segment", "goodbye", "died", "aborted", "ending"):
            node.handlers[kind] = getattr(self, f"_on_{kind}")

        _alive.add(self)

    def check(self, call: str) -> None:
        """:raises ProtocolError: in a process that was forked from the one that opened it."""
        if self.node.forked:
            raise ProtocolError(
                f"{call}: {self.presence.label} was opened in pid {self.node.pid}, and this is pid {os.getpid()}, "
                f"forked from it; start processes by spawn, and open it there"
            )

    def check_open(self, rank: int) -> None:
        """:raises AbortedError: if the rank has closed its handle."""
        with self.node.mutex:
            self.presence.check_open(rank)

    # Gates

    def barrier(self, rank: int, timeout: float) -> None:
        """Wait for every rank."""
        self._barrier.pass_through(rank, timeout)

    def reset(self, rank: int, timeout: float) -> None:
        """Drop every key, once all ranks are here. This rank's other waits are over at once."""
        with self.node.mutex:
            woken = self._end_waits_of(rank, f"{self.presence.me(rank)}: it called reset()", self._barrier)

        self.node.after(woken)
        self._reset.pass_through(rank, timeout)

    def _drop(self) -> list[Waiter]:
        """The reset gate opens."""
        # Not those in reset(): it is they who did it.
        text = f"{self.presence.label}: it was reset meanwhile"
        woken = settle(self.keys.waiters(), lambda _: lambda: AbortedError(text))
        woken += self._barrier.end(lambda _: lambda: AbortedError(text))
        self.node.trash.extend(self.keys.drop())
        return woken + self.keys.after_drop()

    # Ends

    def close(self, rank: int) -> None:
        """Say goodbye: waits that only this rank could satisfy end. Where that is interrupted, it can be done again."""
        if self.node.forked:
            return

        try:
            if not self._say_goodbye(rank):
                return

            if self._timer is not None and self._timer is not threading.current_thread():
                self._timer.cancel()
                self._timer.join(SETTLING)  # it holds what is let go here

            self._bequeath(rank)
            self.gpu.close()
            self.node.close()
            self.let_go()
        except BaseException:
            self._interrupted = True
            raise

    def _say_goodbye(self, rank: int) -> bool:
        """Whether everything is to be closed then: it was the last rank of this process."""
        with self.node.mutex:
            if rank in self.presence.closed:
                again, self._interrupted = self._interrupted, False
                return again and self.presence.closed.issuperset(self.node.own_ranks)

            estate, parts = self.keys.heirs.estate_of(), self.keys.heirs.parts_of(rank)
            self.node.tell_all(frame("goodbye", rank, parts, estate))
            woken = self._left(rank, parts, estate)
            reason = f"{self.presence.me(rank)}: it was closed"
            woken += self._end_waits_of(rank, reason, self._barrier, self._reset)
            last = self.presence.closed.issuperset(self.node.own_ranks)

        self.node.after(woken)
        return last

    def _bequeath(self, rank: int) -> None:
        """The last rank of this process has left. Messages on a device are given a moment to be copied out in; what
        others may still read after that is not let go."""
        with self.node.mutex:
            given = any(value.marks for value in self.letters.lent())
            waiter = self.letters.await_receivers(rank) if given and not self._ending else None

        if waiter is not None:
            self.node.wait(waiter, time.monotonic() + LINGER)

        with self.node.mutex:
            alone = self.node.gone >= set(self.node.links)
            values = [] if alone else [*self.keys.lent(), *self.letters.lent()]

        self.gpu.leave(value for value in values if value.marks)

    def die(self, rank: int, reason: str) -> None:
        """The rank failed: every wait that is not satisfied ends, now and later."""
        if self.node.forked:
            return

        with self.node.mutex:
            self.presence.die(rank, reason)
            self.node.tell_all(frame("died", rank, reason))
            woken = self._end()

        self.node.after(woken)

    def abort(self, reason: str) -> None:
        """End every wait of every rank, now and later."""
        if self.node.forked:
            return

        with self.node.mutex:
            self.presence.abort(reason)
            self.node.tell_all(frame("aborted", reason))
            woken = self._end()

        self.node.after(woken)

    def _torn(self, what: str) -> list[Waiter]:
        """A signal's handler has raised in the midst of a change to what this node knows, and what it had begun is
        lost. Nothing that builds on it may go well, here or elsewhere."""
        reason = f"rank {self.node.own_ranks[0]} was interrupted while {what}"
        self.presence.abort(reason)
        self.node.tell_all(frame("aborted", reason))
        return self._end()

    def let_go(self) -> None:
        """Give back shared memory, and what peers have given; tensors that are still borrowed keep theirs."""
        with self.node.mutex:
            self.keys.let_go()

        self.node.trash.clear()
        self.arena.close()
        with self._mapping:
            while self._segments:
                _, found = self._segments.popitem()
                if isinstance(found, Mapping):
                    found.close()
                elif found[0] != LOST:
                    os.close(found[0])

    # Shared memory of peers

    def mapping(self, node: int, number: int) -> Mapping:
        """A peer's segment; mapped when it is first needed.

        :raises DtorchError: if the system has no room for that.
        :raises AbortedError: if this is closed.
        """
        with self._mapping:
            found = self._segments.get((node, number))
            if found is None:
                raise AbortedError(f"{self.presence.label}: it is closed; open it anew")

            if not isinstance(found, Mapping):
                fd, size = found
                if fd == LOST:
                    raise lost(self.presence.label, "a peer's shared memory")

                found = Mapping(_copy(fd), size)  # if that fails, it can be tried again
                self._segments[node, number] = found
                os.close(fd)

            return found

    def _announce(self, segment: Segment) -> None:
        with self.node.mutex:
            self.node.tell_all(frame("segment", segment.number, segment.size), fd=segment.fd)

        self.node.send()  # no more than that: the arena is held, and a job may need it

    def _arrived(self, home: int, described: Any, body: bytes) -> Value:  # noqa: ANN401
        kind, *fields = described
        if kind == "body":
            return ArrivedValue(Layout.from_json(fields[0]), body)

        if kind == "cuda":
            return MappedGpuValue(self.gpu, home, *fields)

        if kind == "host":
            return UploadedValue(self.gpu, fields[0], self._arrived(home, fields[1], body))

        number, offset, layout = fields
        return MappedValue(Layout.from_json(layout), offset, lambda: self.mapping(home, number))

    # What other nodes say. Under the mutex.

    def _on_segment(self, peer: int, message: Message) -> Iterable[Waiter]:
        number, size = message.fields
        self._segments[peer, number] = self.node.links[peer].take_fd(), size
        return ()

    def _on_goodbye(self, peer: int, message: Message) -> Iterable[Waiter]:
        return self._left(*message.fields)

    def _on_died(self, peer: int, message: Message) -> Iterable[Waiter]:
        rank, reason = message.fields
        self.presence.die(rank, reason)
        return self._end()

    def _on_aborted(self, peer: int, message: Message) -> Iterable[Waiter]:
        (reason,) = message.fields
        self.presence.abort(reason)
        return self._end()

    def _on_ending(self, peer: int, message: Message) -> Iterable[Waiter]:
        died, aborted = message.fields
        # A process that ends closes its connections one by one, so that this node may hear of it here first. If a
        # survivor leaves because of it, it must not be taken for the one that is missing.
        for rank, reason in died:
            self.presence.die(rank, reason)

        if aborted is not None:
            self.presence.abort(aborted)

        self._said_all.add(peer)
        return self._end()

    def _left(self, rank: int, parts: Any, estate: Any) -> list[Waiter]:  # noqa: ANN401
        self.presence.leave(rank)
        return self.keys.heirs.rank_left(rank, parts, estate) + self._give_up()

    def _node_gone(self, node: int) -> list[Waiter]:
        self.gpu.node_gone(node)
        self.joint.node_gone(node)
        woken = self.letters.node_gone(node) + self.keys.node_gone(node)
        return woken + (self._end_if_all_is_said() if self._ending else [])

    # A rank has died or aborted. What others had told this node before they knew is still on its way, and what it
    # satisfies is satisfied on every node alike: so each says when it has nothing more to say of that time.

    def _end(self) -> list[Waiter]:
        if not self._ending:
            self._ending = True
            self.node.tell_all(frame("ending", list(self.presence.died.items()), self.presence.aborted))
            if self._silent() and not self.presence.closed.issuperset(self.node.own_ranks):
                timer = threading.Timer(SETTLING, self._end_now)
                timer.name, timer.daemon = f"{self.presence.label} ends", True
                # There may be no room for a thread. Then a survivor that is stopped is waited for.
                with contextlib.suppress(RuntimeError):
                    timer.start()
                    self._timer = timer

        return self._end_if_all_is_said()

    def _silent(self) -> set[int]:
        """The nodes that may have something to say."""
        return set(self.node.links) - self.node.gone - self._said_all

    def _end_if_all_is_said(self) -> list[Waiter]:
        if not self._ending or self._silent():
            return []

        self.presence.all_said = True
        if self._timer is not None:
            self._timer.cancel()

        return self._give_up()

    def _end_now(self) -> None:
        self.node.look()  # what has arrived counts, also where no thread has found the time to read it
        with self.node.mutex:
            self._said_all.update(self.node.links)
            woken = self._end_if_all_is_said()

        self.node.after(woken)

    def _give_up(self) -> list[Waiter]:
        """Whatever can't end well any more: the waiters that this settles."""
        parts = (self.keys, self._barrier, self._reset, self.joint, self.letters)
        return [waiter for part in parts for waiter in part.give_up()]

    def _end_waits_of(self, rank: int, reason: str, *gates: Gate) -> list[Waiter]:
        def failure_of(waiter: Waiter) -> Failure | None:
            return (lambda: AbortedError(reason)) if waiter.rank == rank else None

        woken = settle(self.keys.waiters(), failure_of)
        return woken + [waiter for gate in gates for waiter in gate.end(failure_of)]


def _copy(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        raise DtorchError(
            f"a peer's shared memory can't be mapped: {error.strerror}; raise the limit (ulimit -n)"
        ) from error


def _forked() -> None:
    """In a forked child: the sessions are the parent's, and have to end when it does."""
    for session in list(_alive):
        session.node.forget_fork()


os.register_at_fork(after_in_child=_forked)
