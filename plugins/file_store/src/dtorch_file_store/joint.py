"""Joint work between processes: each computes what its own ranks get, and shows the others what they need for it.

Every rank tells all nodes what it brings. Where all is small, the values come along, and one word in each direction is
all that a collective costs. What is larger goes through staging buffers that stay in cache, see
:mod:`dtorch_file_store.staging`: the nodes go from step to step together.

The thread that waits for a call does this node's part. Where none waits, whoever reads the sockets does it, so that a
call goes on while its rank computes: see :mod:`dtorch_file_store.progress`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import get_ident

import torch

from dtorch_core import DtorchError, ProtocolError, StoreTimeoutError, errors
from dtorch_core.joint import Offer, Work, copy_of
from dtorch_core.presence import Failure, raise_if, settle
from dtorch_file_store import offers
from dtorch_file_store.arena import Arena, Mapping
from dtorch_file_store.call_ends import CallEnds
from dtorch_file_store.calls import QUEUED, Call
from dtorch_file_store.gpu import Gpu
from dtorch_file_store.gpu_parts import GpuParts
from dtorch_file_store.node import Node
from dtorch_file_store.parts import Parts
from dtorch_file_store.progress import Progress
from dtorch_file_store.tickets import FileTicket
from dtorch_file_store.waiting import Notice, Waiter
from dtorch_file_store.wire import Message, frame

_AGAIN = 0.01
"""Seconds that a wait whose time is over gives to work that is being done, at least, before it asks again."""


class Joint:
    """The joint work of one opening."""

    def __init__(self, node: Node, arena: Arena, mapping: Callable[[int, int], Mapping], gpu: Gpu) -> None:
        """
        :param mapping: a node's segment.
        """
        self._node = node
        self._presence = node.presence
        self._calls: dict[str, Call] = {}
        self.ends = CallEnds(node)
        self.on_gpu = GpuParts(node, gpu)
        self._parts = Parts(node, arena, mapping, self.on_gpu, self._calls)
        self._progress = Progress(node, self._parts, self.on_gpu, self._calls, self.give_up)
        for kind in ("post", "staged", "worked", "broken", "retired"):
            node.handlers[kind] = getattr(self, f"_on_{kind}")

    def post(self, key: str, offer: Offer, work: Work, stream: torch.cuda.Stream | None = None) -> FileTicket:
        """Bring an offer. Never waits for another rank.

        :param work: on the CPU, declared.
        """
        rank, node, presence = offer.rank, self._node, self._presence
        queue = None
        if offer.tensors and offer.tensors[0].is_cuda:
            queue = stream if stream is not None else torch.cuda.current_stream(offer.tensors[0].device)
            body = b""
            brought, packed, held = self.on_gpu.offered(offer, queue, work)
        else:
            brought = offers.own(offer)
            packed, body = offers.pack(brought) if node.links else ([], b"")

        call: Call | None = self._calls.get(key)
        if call is not None and call.came == presence.world_size - 1:
            node.look()  # somebody may have given up before this rank came

        try:
            try:
                with node.mutex:
                    call = self._call_for(key, rank)
                    call.offers[rank] = brought
                    call.came += 1
                    call.work = call.work or work
                    if queue is not None:
                        call.queue = call.queue or queue
                        call.held[rank] = held

                    if node.links:
                        node.tell_all(frame("post", rank, key, *packed, body=body))

                    runs = call.complete
                    if runs:
                        call.running = get_ident()
            except DtorchError:
                if queue is not None:
                    self.on_gpu.withdraw(held, queue)

                raise

            node.after()
            if runs:
                self._progress.do(call)
        except BaseException:
            if call is not None:
                self._progress.interrupted(call, None)

            raise

        return FileTicket(self, call, rank, -1 if queue is None else offer.tensors[0].get_device())

    def _call_for(self, key: str, rank: int) -> Call:
        """The call that a rank begins. Under the mutex.

        :raises DtorchError: if nothing can be begun any more, or the rank has begun it already.
        """
        presence = self._presence
        if not presence.complete or self.ends.retired is not None:
            presence.check_open(rank)
            raise_if(self.ends.begins_none(rank, key))

        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = Call(key, presence.world_size)

        if call.offers[rank] is not None:
            raise ProtocolError(f"{presence.at(key)}: rank {rank} has brought its part already")

        return call

    def wait_for(self, call: Call, rank: int, timeout: float) -> None:
        """Wait until the call is finished, doing this node's part."""
        node, deadline = self._node, time.monotonic() + timeout
        node.look_first(call.moves, timeout)
        while not call.finished:
            waiter: Waiter | None = None
            try:
                with node.mutex:
                    woken = self._progress.left(call) if call.running else []  # by an interrupt of this thread
                    runs = self._progress.may_go_on(call)
                    if call.running == QUEUED:  # a thread at a job does it as it waits, with what else is queued
                        runs = not node.jobs.busy

                    if runs:
                        call.running = get_ident()
                    elif not call.finished:
                        if not self._presence.complete or self.ends.retired is not None:
                            raise_if(self.ends.hopeless(call, rank))

                        waiter = Waiter(rank)
                        call.waiters.append(waiter)

                if runs:
                    self._progress.do(call)
                    continue

                if woken:
                    node.after(woken)

                if waiter is None:
                    break

                node.wait(waiter, deadline)
            except BaseException:  # Ctrl-C: the wait can be repeated, and meanwhile somebody else has to go on
                self._progress.interrupted(call, waiter)
                raise

            if waiter.done:
                continue

            with node.mutex:
                if waiter.done:
                    continue

                if not waiter.settled:
                    call.waiters.remove(waiter)
                    if call.running:  # another thread is at work, which ends by itself; this one looks in once more
                        deadline = time.monotonic() + max(timeout, _AGAIN)
                        continue

                    waiter.error, woken = self._retire(call, rank, timeout)

            node.after(woken)
            raise_if(waiter.error)

        if call.error is not None:
            raise copy_of(call.error)

    def unfinished(self, rank: int) -> list[Call]:
        """What a rank has begun, in order, and is not at its end here."""
        with self._node.mutex:
            return [call for call in self._calls.values() if call.offers[rank] is not None]

    def done(self, call: Call, rank: int) -> bool:
        """It is finished, or never will be."""
        if call.finished:
            return True

        with self._node.mutex:
            return call.finished or self.ends.hopeless(call, rank) is not None

    def notify(self, call: Call, rank: int, callback: Callable[[], None]) -> None:
        """Call back when it is done; at once if it is."""
        with self._node.mutex:
            if not call.finished and self.ends.hopeless(call, rank) is None:
                call.notices.append(Notice(rank, callback))
                return

        callback()

    # Ends. Under the mutex; they return the waiters that they settle.

    def give_up(self) -> list[Waiter]:
        """Fail what can't end well any more."""
        failed: list[Waiter] = []
        for call in list(self._calls.values()):
            # Those asleep have a deadline of their own, also when another rank has given up at its.
            failed += settle(call.waiters, lambda waiter, call=call: self.ends.stuck(call, waiter.rank))  # type: ignore[misc]
            call.waiters = [waiter for waiter in call.waiters if not waiter.settled]
            failed += settle(call.notices, lambda notice, call=call: self.ends.hopeless(call, notice.rank))  # type: ignore[misc]
            call.notices = [notice for notice in call.notices if not notice.settled]
            failure = self._lost(call) if self._presence.all_said else None
            if failure is not None:  # what comes late finds nothing to go on with: the tensors are their owners' again
                failed += self._progress.end(call, failure())

        return failed

    def _lost(self, call: Call) -> Failure | None:
        """Why this node's part of a call never goes on, if nothing can any more."""
        rank = self._node.own_ranks[0]
        return self._presence.over(rank, call.what(rank)) if self.ends.stuck(call, rank) is not None else None

    def node_gone(self, node: int) -> None:
        """A node reads nothing any more."""
        self._parts.node_gone(node)

    def _retire(self, call: Call, rank: int, timeout: float) -> tuple[Failure, list[Waiter]]:
        """A rank gives up: nothing can be begun any more. Its error, and whom to wake."""
        what = call.what(rank)
        late = self.ends.late(call, timeout)
        self._node.tell_all(frame("retired", f"rank {rank} gave up on {what}: {late}"))
        self.ends.retired = self.ends.retired or f"rank {rank} gave up on {what}: {late}"
        text = f"{self._presence.me(rank)}, {what}: {late}"
        return lambda: StoreTimeoutError(text), self.give_up()

    # What other nodes say. Under the mutex.

    def _on_post(self, peer: int, message: Message) -> Iterable[Waiter]:
        rank, key, *packed = message.fields
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = Call(key, self._presence.world_size)

        call.offers[rank] = offers.unpack(peer, packed, message.body)
        call.came += 1
        return self._progress.moved(call)

    def _on_staged(self, peer: int, message: Message) -> Iterable[Waiter]:
        key, number, *place = message.fields
        call = self._calls.get(key)
        if call is None:
            return ()

        call.said[peer] = number
        if place:
            call.halves[peer] = place[0], place[1], place[2]

        return self._progress.moved(call)

    def _on_worked(self, peer: int, message: Message) -> Iterable[Waiter]:
        key, mark = message.fields
        call = self._calls.get(key)
        if call is None:
            return ()

        call.said[peer] = 0
        call.done = ((peer, mark),)
        return self._progress.moved(call)

    def _on_broken(self, peer: int, message: Message) -> Iterable[Waiter]:
        key, kind, text = message.fields
        call = self._calls.get(key)
        if call is None:
            return ()

        call.broken = getattr(errors, kind, DtorchError)(text)
        return () if call.running else self._progress.end(call, call.broken)  # who is at it gets as far as it can

    def _on_retired(self, peer: int, message: Message) -> Iterable[Waiter]:
        (reason,) = message.fields
        self.ends.retired = self.ends.retired or reason
        return self.give_up()
