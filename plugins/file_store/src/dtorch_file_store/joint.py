"""Joint work between processes: each computes what its own ranks get, and shows the others what they need for it.

Every rank tells all nodes what it brings. Where all is small, the values come along, and one word in each direction is
all that a collective costs. What is larger goes through staging buffers that stay in cache, see
:mod:`dtorch_file_store.staging`: the nodes go from step to step together.

The thread that waits for a call does this node's part. Where none waits, whoever reads the sockets does it, so that a
call goes on while its rank computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident

import torch

from dtorch_core import AbortedError, CollectiveMismatchError, DtorchError, ProtocolError, StoreTimeoutError, errors
from dtorch_core._text import describe_error, interruption, rank_list
from dtorch_core.joint import Offer, Work, copy_of, let_go
from dtorch_core.presence import Failure, raise_if, settle
from dtorch_file_store import offers
from dtorch_file_store.arena import Arena, Mapping
from dtorch_file_store.call_ends import CallEnds
from dtorch_file_store.calls import QUEUED, Call
from dtorch_file_store.gpu import Gpu
from dtorch_file_store.gpu_parts import GpuParts
from dtorch_file_store.node import Node
from dtorch_file_store.parts import Parts
from dtorch_file_store.tickets import FileTicket
from dtorch_file_store.waiting import Again, Notice, Waiter
from dtorch_file_store.wire import Message, frame

_inference = getattr(torch._C, "_InferenceMode", torch.inference_mode)
"""Tensors made in inference mode can be written in it alone, others in it too; and it records no gradients. Without
torch's wrapper, which costs as much as a small copy. A new one each time: a part that sends may do another call's part.
"""


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
                self._do(call)
        except BaseException:
            if call is not None:
                self._interrupted(call, None)

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
                    woken = self._left(call) if call.running else []  # by an interrupt of this thread
                    runs = self._may_go_on(call) or call.running == QUEUED
                    if runs:
                        call.running = get_ident()
                    elif not call.finished:
                        if not self._presence.complete or self.ends.retired is not None:
                            raise_if(self.ends.hopeless(call, rank))

                        waiter = Waiter(rank)
                        call.waiters.append(waiter)

                if runs:
                    self._do(call)
                    continue

                if woken:
                    node.after(woken)

                if waiter is None:
                    break

                node.wait(waiter, deadline)
            except BaseException:  # Ctrl-C: the wait can be repeated, and meanwhile somebody else has to go on
                self._interrupted(call, waiter)
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
                failed += self._end(call, failure())

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

    # The work

    def _may_go_on(self, call: Call) -> bool:
        return call.complete and not call.running and not call.finished and not call.halted(call.awaits)

    def _moved(self, call: Call) -> Iterable[Waiter]:
        """It may go on: wake a thread that waits for it, or have the one that reads do it. Under the mutex."""
        if not self._may_go_on(call):
            return ()

        if call.waiters:
            waiter = call.waiters[-1]
            waiter.done = True
            del call.waiters[-1]
            return (waiter,)

        call.running = QUEUED
        self._node.jobs.append(Again(self._go_on, call, True))
        return ()

    def _do(self, call: Call) -> None:
        """Go on; ``running`` is this thread already."""
        node = self._node
        if node.busy:
            call.running = QUEUED
            node.jobs.append(Again(self._go_on, call, True))
        else:
            node.do(partial(self._go_on, call))

    def _go_on(self, call: Call, queued: bool = False) -> None:
        """Do this node's part, as far as it goes now; ``running`` is this thread, or it is queued."""
        woken: list[Waiter] = []
        runs = True
        try:
            if queued:
                with self._node.mutex:
                    if call.running != QUEUED:  # a thread that waits for it has come by first
                        return

                    call.running = get_ident()

            while runs:
                error: BaseException | None = None
                interrupt: BaseException | None = None
                try:
                    with _inference(True):
                        if call.steps is None:
                            call.steps = self._parts.of(call)

                        awaits = next(call.steps, None)
                except BaseException as failure:  # reaches this node's ranks through their tickets
                    awaits, error = None, failure
                    if not isinstance(failure, Exception):  # Ctrl-C: the thread's alone, and the others are told of it
                        what = interruption(self._node.own_ranks[0], call.key, failure)
                        interrupt, error = failure, AbortedError(f"{self._presence.label}: {what}")

                    self._break(call, error)
                    let_go(error)

                with self._node.mutex:
                    runs = False  # and not asked of the call below: another thread may be at it by then
                    if awaits is None:
                        woken = self._end(call, error)
                    elif call.broken is not None and call.halted(awaits):
                        woken = self._end(call, call.broken)
                    elif call.halted(awaits):
                        call.awaits, call.running = awaits, 0
                        woken = self.give_up()
                    else:
                        call.awaits, runs = awaits, True

                self._node.after(woken)
                if interrupt is not None:
                    raise interrupt
        except BaseException:  # Ctrl-C between those lines
            with self._node.mutex:
                woken = woken + self._left(call)

            self._node.after(woken)
            raise

    def _interrupted(self, call: Call, waiter: Waiter | None) -> None:
        """This thread neither waits for it nor works at it any more."""
        with self._node.mutex:
            woken = self._left(call)
            if waiter is None or waiter.done:  # it was to go on
                woken += self._moved(call)
            elif waiter in call.waiters:
                call.waiters.remove(waiter)

        self._node.after(woken)

    def _left(self, call: Call) -> list[Waiter]:
        """If an interrupt has taken this thread out of its work at a call, that can't go well. Under the mutex."""
        if call.running != get_ident() or call.finished:
            return []

        if call.steps is None:  # nothing is done yet
            call.running = 0
            return list(self._moved(call))

        error = AbortedError(f"{self._presence.label}: rank {self._node.own_ranks[0]} was interrupted in {call.key}")
        self._node.tell_all(frame("broken", call.key, type(error).__name__, str(error)))
        return self._end(call, error)

    def _break(self, call: Call, error: BaseException) -> None:
        """This node can't do its part: those that wait for it learn why. What all find wrong they find themselves."""
        if isinstance(error, CollectiveMismatchError):
            kind, text = type(error).__name__, str(error)
        else:
            kind = type(error).__name__ if isinstance(error, DtorchError) else DtorchError.__name__
            ranks = rank_list(self._node.own_ranks)
            text = f"{self._presence.label}, {call.key}: {ranks} could not do its part: {describe_error(error)}"

        with self._node.mutex:
            self._node.tell_all(frame("broken", call.key, kind, text))

        self._node.send()

    def _end(self, call: Call, error: BaseException | None) -> list[Waiter]:
        """Under the mutex. May be done again where it was interrupted: what says that it is over comes last."""
        call.error = call.error or error
        self._calls.pop(call.key, None)
        self._parts.ended(call)
        self._node.trash.append((call.offers, call.steps))
        for waiter in call.waiters:
            waiter.done = True

        woken = call.waiters + call.notices  # after the threads: a callback may take its time
        call.waiters, call.notices, call.offers, call.steps = [], [], [], None
        call.finished, call.running = True, 0
        if call.dropped:
            self.on_gpu.abandon(call)

        return woken

    # What other nodes say. Under the mutex.

    def _on_post(self, peer: int, message: Message) -> Iterable[Waiter]:
        rank, key, *packed = message.fields
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = Call(key, self._presence.world_size)

        call.offers[rank] = offers.unpack(peer, packed, message.body)
        call.came += 1
        return self._moved(call)

    def _on_staged(self, peer: int, message: Message) -> Iterable[Waiter]:
        key, number, *place = message.fields
        call = self._calls.get(key)
        if call is None:
            return ()

        call.said[peer] = number
        if place:
            call.halves[peer] = place[0], place[1], place[2]

        return self._moved(call)

    def _on_worked(self, peer: int, message: Message) -> Iterable[Waiter]:
        key, mark = message.fields
        call = self._calls.get(key)
        if call is None:
            return ()

        call.said[peer] = 0
        call.done = ((peer, mark),)
        return self._moved(call)

    def _on_broken(self, peer: int, message: Message) -> Iterable[Waiter]:
        key, kind, text = message.fields
        call = self._calls.get(key)
        if call is None:
            return ()

        call.broken = getattr(errors, kind, DtorchError)(text)
        return () if call.running else self._end(call, call.broken)  # who is at it gets as far as it can

    def _on_retired(self, peer: int, message: Message) -> Iterable[Waiter]:
        (reason,) = message.fields
        self.ends.retired = self.ends.retired or reason
        return self.give_up()
