"""Joint work between processes: each computes what its own ranks get, and shows the others what they need for it.

Every rank tells all nodes what it brings. Where all is small, the values come along, and one word in each direction is
all that a collective costs. What is larger goes through staging buffers that stay in cache, see
:mod:`dtorch_file_store.staging`: the nodes go from step to step together.

The thread that waits for a call does this node's part. Where none waits, whoever reads the sockets does it, so that a
call goes on while its rank computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dtorch_core import (
    AbortedError,
    CollectiveMismatchError,
    DtorchError,
    ProtocolError,
    StoreTimeoutError,
    errors,
    streams,
)
from dtorch_core._shapes import Shape
from dtorch_core._text import describe_error, rank_list, seconds
from dtorch_core.declared import Declared, Place, Result, at_risk, compute
from dtorch_core.joint import Offer, Ticket, Work, copy_of
from dtorch_core.reduction import Rule
from dtorch_file_store import offers
from dtorch_file_store.arena import Arena, Block, Mapping
from dtorch_file_store.gpu import Gpu
from dtorch_file_store.node import Node
from dtorch_file_store.offers import Brought
from dtorch_file_store.staged import Flat, Staged
from dtorch_file_store.staging import Plan
from dtorch_file_store.waiting import Failure, Notice, Waiter, raise_if, settle
from dtorch_file_store.wire import Message, frame

LINE = "\n"
"""A note's first line says what the work is; the rest is data."""

_LINE_BYTES = 64


class Call:
    """One piece of joint work, as this node knows it."""

    __slots__ = (
        "awaited",
        "awaits",
        "came",
        "done",
        "dropped",
        "error",
        "finished",
        "halves",
        "held",
        "key",
        "notes",
        "notices",
        "offers",
        "parted",
        "queue",
        "running",
        "said",
        "steps",
        "waiters",
        "work",
        "written",
    )

    def __init__(self, key: str, world_size: int) -> None:
        self.key = key
        self.offers: list[Brought | None] = [None] * world_size
        self.came = 0
        self.work: Work | None = None
        """From the first rank of this node; all bring the same, or it says what is wrong."""
        self.notes: Sequence[str] = ()
        self.written: Sequence[Place] = ()
        """On the CPU, the tensors that it writes, of all ranks."""
        self.waiters: list[Waiter] = []
        self.notices: list[Waiter] = []
        """Told at the end only, while waiters are also woken to go on."""
        self.steps: Iterator[int] | None = None
        """This node's part: it yields the exchange that it can't go on without."""
        self.awaits = -1
        """That exchange."""
        self.awaited: Sequence[int] = ()
        """The nodes that have to reach it."""
        self.queue: torch.cuda.Stream | None = None
        """On CUDA, the stream of the first rank of this node."""
        self.done: tuple[Any, ...] = ()
        """On CUDA, the points of streams behind which the work is done."""
        self.held: dict[int, Sequence[Tensor]] = {}
        """On CUDA, this node's tensors until their rank's stream is behind the work."""
        self.dropped: set[int] = set()
        """Ranks whose ticket was dropped before they had waited."""
        self.said: dict[int, int] = {}
        """How far each node says it is."""
        self.halves: dict[int, tuple[int, int, int]] = {}
        """Each node's staging buffer: segment, place, bytes of a half."""
        self.parted: set[int] = set()
        """Nodes that have ended their part, and read nothing any more."""
        self.running = False
        """A thread is at it."""
        self.finished = False
        self.error: BaseException | None = None

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank, offer in enumerate(self.offers) if offer is None]

    def what(self, rank: int) -> str:
        """How messages to ``rank`` call it."""
        offer = self.offers[rank]
        return f"{self.key}, {offer.note.partition(LINE)[0]}" if offer is not None else self.key


class Joint:
    """The joint work of one opening."""

    def __init__(self, node: Node, arena: Arena, mapping: Callable[[int, int], Mapping], gpu: Gpu) -> None:
        """
        :param mapping: a node's segment.
        """
        self._node, self._arena, self._mapping = node, arena, mapping
        self._presence = node.presence
        self.gpu = gpu
        self._calls: dict[str, Call] = {}
        self._lent: dict[str, tuple[Block, set[int]]] = {}
        """Staging buffers of calls that have ended here, and the nodes that may still read them."""
        self._retired: str | None = None
        for kind in ("post", "staged", "worked", "parted", "broken", "retired"):
            node.handlers[kind] = getattr(self, f"_on_{kind}")

    def post(self, key: str, offer: Offer, work: Work, stream: torch.cuda.Stream | None = None) -> FileTicket:
        """Bring an offer. Never waits for another rank.

        :param work: on the CPU, declared.
        """
        rank, node, presence = offer.rank, self._node, self._presence
        queue = None
        if offer.tensors and offer.tensors[0].is_cuda:
            queue = stream if stream is not None else torch.cuda.current_stream(offer.tensors[0].device)
            brought, packed, body = self._offered(offer, queue)
        else:
            brought = offers.own(offer)
            packed, body = offers.pack(brought) if node.links else ([], b"")

        call = self._calls.get(key)
        if call is not None and call.came == presence.world_size - 1:
            node.look()  # somebody may have given up before this rank came

        with node.mutex:
            if not presence.complete or self._retired is not None:
                presence.check_open(rank)
                raise_if(self.ended(rank, key))

            call = self._calls.get(key)
            if call is None:
                call = self._calls[key] = Call(key, presence.world_size)

            if call.offers[rank] is not None:
                raise ProtocolError(f"{presence.at(key)}: rank {rank} has brought its part already")

            call.offers[rank] = brought
            call.came += 1
            call.work = call.work or work
            if queue is not None:
                call.queue = call.queue or queue
                call.held[rank] = offer.tensors

            if node.links:
                node.tell_all(frame("post", rank, key, *packed, body=body))

            runs = call.running = call.came == presence.world_size

        node.after()
        if runs:
            self._go_on(call)

        return FileTicket(self, call, rank)

    def wait_for(self, call: Call, rank: int, timeout: float) -> None:
        """Wait until the call is finished, doing this node's part."""
        node, deadline = self._node, time.monotonic() + timeout
        while not call.finished:
            with node.mutex:
                runs = self._may_go_on(call)
                if runs:
                    call.running = True
                elif not call.finished:
                    if not self._presence.complete or self._retired is not None:
                        raise_if(self._hopeless(call, rank))

                    waiter = Waiter(rank)
                    call.waiters.append(waiter)

            if runs:
                self._go_on(call)
                continue

            if call.finished:
                break

            node.wait(waiter, deadline)
            if waiter.done:
                continue

            woken: list[Waiter] = []
            with node.mutex:
                if waiter.done or (not waiter.settled and call.running):
                    continue  # it is at work: that ends by itself

                if not waiter.settled:
                    call.waiters.remove(waiter)
                    waiter.error, woken = self._retire(call, rank, timeout)

            node.after(woken)
            raise_if(waiter.error)

        if call.error is not None:
            raise copy_of(call.error)

    def done(self, call: Call, rank: int) -> bool:
        """It is finished, or never will be."""
        if call.finished:
            return True

        with self._node.mutex:
            return call.finished or self._hopeless(call, rank) is not None

    def notify(self, call: Call, rank: int, callback: Callable[[], None]) -> None:
        """Call back when it is done; at once if it is."""
        with self._node.mutex:
            if not call.finished and self._hopeless(call, rank) is None:
                call.notices.append(Notice(rank, callback))
                return

        callback()

    def ended(self, rank: int, what: str) -> Failure | None:
        """Why nothing can be begun any more; None while it can. Under the mutex."""
        return self._presence.ended(rank, what) or self._gave_up(rank, what)

    def _gave_up(self, rank: int, what: str) -> Failure | None:
        if self._retired is None:
            return None

        reason = f"{self._presence.me(rank)}, {what}: {self._retired}"
        return lambda: AbortedError(reason)

    # Ends. Under the mutex; they return the waiters that they settle.

    def give_up(self) -> list[Waiter]:
        """Fail what can't end well any more."""
        failed: list[Waiter] = []
        for call in list(self._calls.values()):
            # Those asleep have a deadline of their own, also when another rank has given up at its.
            failed += settle(call.waiters, lambda waiter, call=call: self._stuck(call, waiter.rank))  # type: ignore[misc]
            call.waiters = [waiter for waiter in call.waiters if not waiter.settled]
            failed += settle(call.notices, lambda notice, call=call: self._hopeless(call, notice.rank))  # type: ignore[misc]
            call.notices = [notice for notice in call.notices if not notice.settled]

        return failed

    def node_gone(self, node: int) -> None:
        """A node reads nothing any more."""
        for key in list(self._lent):
            self._give_back(key, node)

    def _stuck(self, call: Call, rank: int) -> Failure | None:
        """Why those who have not come can't come any more, or those who have can't go on."""
        if call.came == self._presence.world_size:
            if call.running or not self._halted(call):
                return None

            gone = [rank for rank, home in enumerate(self._node.homes) if home in self._halted(call)]
            return self._presence.over(rank, call.what(rank)) or self._presence.lacks(rank, gone, call.what(rank))

        if rank in self._presence.closed:
            reason = f"{self._presence.me(rank)}, {call.what(rank)}: it was closed"
            return lambda: AbortedError(reason)

        return self._presence.lacks(rank, call.missing(), call.what(rank))

    def _hopeless(self, call: Call, rank: int) -> Failure | None:
        """Why ``rank`` need not begin to wait for it."""
        if call.came == self._presence.world_size:
            return self._stuck(call, rank)

        what = call.what(rank)
        return self._stuck(call, rank) or self._presence.over(rank, what) or self._gave_up(rank, what)

    def _halted(self, call: Call) -> list[int]:
        """The nodes that have to go on before this one can."""
        return [node for node in call.awaited if call.said.get(node, -1) < call.awaits]

    def _retire(self, call: Call, rank: int, timeout: float) -> tuple[Failure, list[Waiter]]:
        """A rank gives up: nothing can be begun any more. Its error, and whom to wake."""
        what = call.what(rank)
        if call.came < self._presence.world_size:
            late = f"{rank_list(call.missing())} had not come after {seconds(timeout)}"
        else:
            ranks = [other for other, home in enumerate(self._node.homes) if home in self._halted(call)]
            late = f"{rank_list(ranks)} had come, and did not go on within {seconds(timeout)}"

        self._node.tell_all(frame("retired", f"rank {rank} gave up on {what}: {late}"))
        self._retired = self._retired or f"rank {rank} gave up on {what}: {late}"
        text = f"{self._presence.me(rank)}, {what}: {late}"
        return lambda: StoreTimeoutError(text), self.give_up()

    # The work

    def _may_go_on(self, call: Call) -> bool:
        return (
            call.came == self._presence.world_size
            and not call.running
            and not call.finished
            and not self._halted(call)
        )

    def _moved(self, call: Call) -> Iterable[Waiter]:
        """It may go on: wake a thread that waits for it, or have the one that reads do it. Under the mutex."""
        if not self._may_go_on(call):
            return ()

        if call.waiters:
            waiter = call.waiters.pop()
            waiter.done = True
            return (waiter,)

        call.running = True
        self._node.jobs.append(lambda: self._go_on(call))
        return ()

    def _go_on(self, call: Call) -> None:
        """Do this node's part, as far as it goes now; ``running`` was set by who calls this."""
        while True:
            error: BaseException | None = None
            ended = False
            try:
                with torch.inference_mode():
                    if call.steps is None:
                        call.steps = self._part(call)

                    awaits = next(call.steps, None)
            except BaseException as failure:  # reaches every rank through its ticket
                awaits, error = None, failure

            with self._node.mutex:
                if awaits is None:
                    ended = True
                    woken = self._end(call, error)
                else:
                    call.awaits = awaits
                    call.running = not self._halted(call)
                    woken = [] if call.running else self.give_up()

            self._node.after(woken)
            if ended or not call.running:
                return

    def _part(self, call: Call) -> Iterator[int]:
        """This node's part. Yields the number of an exchange that all others have to reach first."""
        brought = [offer for offer in call.offers if offer is not None]
        call.notes = [offer.note for offer in brought]
        work = call.work
        assert work is not None, "a rank of this node has come"
        if any(offer.ready is not None for offer in brought):
            yield from self._on_device(call, brought, work)
            return

        tensors = {rank: brought[rank].tensors for rank in self._node.own_ranks}
        if not self._node.links:
            for task in work([Offer(rank, offer.note, tuple(offer.tensors)) for rank, offer in enumerate(brought)]):
                task()

            return

        assert isinstance(work, Declared), "other work is left to the four steps"
        results = work.results(call.notes, [offer.shapes for offer in brought])
        call.written = [place for result in results for place in result.targets]
        if all(offer.small for offer in brought) and not any(
            result.rule is not None and _rounds_by_place(result.rule) for result in results
        ):
            _compute_here(results, brought, tensors)
            return

        try:
            yield from self._staged(call, results, brought, tensors)
        except BaseException as error:
            self._break(call, error)
            raise

    def _staged(
        self, call: Call, results: Sequence[Result], brought: Sequence[Brought], tensors: dict[int, Sequence[Tensor]]
    ) -> Iterator[int]:
        node = self._node
        plan = Plan(results, [offer.shapes for offer in brought], node.homes)
        flat = Flat(results, tensors)
        half = -(-plan.half_bytes // _LINE_BYTES) * _LINE_BYTES
        halves: dict[int, Sequence[Tensor]] = {}
        place = (0, 0, 0)
        if half:
            block = self._arena.allocate(2 * half)
            with node.mutex:
                self._lent[call.key] = block, set(node.links) - node.gone - call.parted

            place = block.segment, block.offset, half
            halves[node.index] = block.bytes().split(half)

        staged = Staged(plan, node.index, flat, halves, _not_mapped, 0)
        for number in range(plan.steps):
            for task in staged.stage(number):
                task()

            with node.mutex:
                node.tell_all(frame("staged", call.key, number, *(place if number == 0 else ())))

            node.after()
            call.awaited = list(node.links)
            yield number
            if number == 0:
                for peer, (segment, offset, size) in call.halves.items():
                    if size:
                        halves[peer] = self._mapping(peer, segment).bytes(offset, 2 * size).split(size)

            for task in staged.compute(number):
                task()

        flat.finish()

    def _offered(self, offer: Offer, queue: torch.cuda.Stream) -> tuple[Brought, list[Any], bytes]:
        """An offer of CUDA tensors, and what others need to know of it."""
        shapes = [Shape.of(tensor) for tensor in offer.tensors]
        if not self._node.links:
            return Brought(offer.note, shapes, False, offer.tensors, ready=queue.record_event()), [], b""

        tickets = self.gpu.tickets(offer.tensors)
        mark = list(self.gpu.mark(queue))
        brought = Brought(offer.note, shapes, False, offer.tensors, ready=(self._node.index, mark))
        return brought, [offer.note, [shape.to_json() for shape in shapes], False, tickets, mark], b""

    def _on_device(self, call: Call, brought: Sequence[Brought], work: Work) -> Iterator[int]:
        """The first node does the work for all, on tensors that it maps; every switch between processes costs."""
        node, gpu = self._node, self.gpu
        worker = node.homes[0]
        if node.index != worker:
            call.awaited = [worker]
            yield 0
            return

        queue = call.queue
        assert queue is not None, "a rank of this node has brought CUDA tensors"
        try:
            gpu.order(queue, [offer.ready for offer in brought if offer.ready is not None])
            mapped = [
                tuple(offer.tensors) if node.is_near(rank) else gpu.mapped(node.homes[rank], offer.tickets)
                for rank, offer in enumerate(brought)
            ]
            with torch.cuda.stream(queue):
                for task in work([Offer(rank, brought[rank].note, mine) for rank, mine in enumerate(mapped)]):
                    task()
        except BaseException as error:
            self._break(call, error)
            raise
        finally:
            # Also where it failed: something may have been queued.
            call.done = (queue.record_event(),)
            for tensors in call.held.values():
                for tensor in tensors:
                    streams.keep_until_done(tensor, queue)

        if node.links:
            with node.mutex:
                node.tell_all(frame("worked", call.key, list(gpu.mark(queue))))

            node.after()

    def order_after(self, call: Call, rank: int, stream: torch.cuda.Stream | None) -> None:
        """Make a rank's stream wait for work on CUDA tensors."""
        queue = stream if stream is not None else torch.cuda.current_stream()
        self.gpu.order(queue, call.done)
        for tensor in call.held.pop(rank, ()):
            streams.keep_until_done(tensor, queue)

    def drop(self, call: Call, rank: int) -> None:
        """A rank has dropped its ticket without having waited."""
        call.dropped.add(rank)
        if call.finished:
            self._abandon(call)

    def _abandon(self, call: Call) -> None:
        for rank in call.dropped & call.held.keys():
            tensors = call.held.pop(rank)
            self.gpu.keep_until(tensors, call.done)

    def _break(self, call: Call, error: BaseException) -> None:
        """This node can't do its part: the others learn why."""
        if isinstance(error, CollectiveMismatchError):
            kind, text = type(error).__name__, str(error)
        else:
            kind = type(error).__name__ if isinstance(error, DtorchError) else "DtorchError"
            ranks = rank_list(self._node.own_ranks)
            text = f"{self._presence.label}, {call.key}: {ranks} could not do its part: {describe_error(error)}"

        with self._node.mutex:
            self._node.tell_all(frame("broken", call.key, kind, text))

        self._node.after()

    def _end(self, call: Call, error: BaseException | None) -> list[Waiter]:
        """Under the mutex."""
        call.finished, call.running = True, False
        call.error = call.error or error
        self._calls.pop(call.key, None)
        if call.dropped:
            self._node.jobs.append(lambda: self._abandon(call))

        self._node.trash.append((call.offers, call.steps))
        call.offers, call.steps = [], None
        if call.halves or call.key in self._lent:
            self._node.tell_all(frame("parted", call.key), lazily=True)

        woken, call.waiters = call.waiters, []
        for waiter in woken:
            waiter.done = True

        woken += call.notices  # after the threads: a callback may take its time
        call.notices = []
        return woken

    def _give_back(self, key: str, node: int) -> None:
        lent = self._lent.get(key)
        if lent is not None:
            block, readers = lent
            readers.discard(node)
            if not readers and key not in self._calls:
                del self._lent[key]
                block.release()

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

    def _on_parted(self, peer: int, message: Message) -> Iterable[Waiter]:
        (key,) = message.fields
        call = self._calls.get(key)
        if call is not None:
            call.parted.add(peer)

        self._give_back(key, peer)
        return ()

    def _on_broken(self, peer: int, message: Message) -> Iterable[Waiter]:
        key, kind, text = message.fields
        call = self._calls.get(key)
        if call is None or call.running:
            return ()

        known = getattr(errors, kind, DtorchError)
        return self._end(call, known(text))

    def _on_retired(self, peer: int, message: Message) -> Iterable[Waiter]:
        (reason,) = message.fields
        self._retired = self._retired or reason
        return self.give_up()


class FileTicket(Ticket):
    """One rank's share in a call."""

    __slots__ = ("_call", "_joint", "_rank")

    def __init__(self, joint: Joint, call: Call, rank: int) -> None:
        self._joint = joint
        self._call = call
        self._rank = rank

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        call = self._call
        if not call.finished or call.error is not None:
            self._joint.wait_for(call, self._rank, timeout)

        if call.done:
            self._joint.order_after(call, self._rank, stream)

    def __del__(self) -> None:
        if self._rank in self._call.held:
            self._joint.drop(self._call, self._rank)

    def notes(self) -> Sequence[str]:
        return self._call.notes

    def done(self) -> bool:
        return self._joint.done(self._call, self._rank)

    def written(self) -> list[int]:
        """Which of this rank's CPU tensors were written; once the work is done."""
        return [place.number for place in self._call.written if place.rank == self._rank]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._joint.notify(self._call, self._rank, callback)


def _compute_here(
    results: Sequence[Result], brought: Sequence[Brought], tensors: dict[int, Sequence[Tensor]]
) -> None:
    """Write all that this node's ranks get: every value is here."""
    copies = {place: tensors[place.rank][place.number].clone() for place in at_risk(results, tensors)}

    def value(place: Place) -> Tensor:
        return copies[place] if place in copies else brought[place.rank].tensors[place.number]

    for result in results:
        targets = [tensors[place.rank][place.number] for place in result.targets if place.rank in tensors]
        if targets:
            compute(result.rule, result.factor, [value(place) for place in result.sources], targets)


def _rounds_by_place(rule: Rule) -> bool:
    """Only whoever computes it knows the last bits: see :func:`dtorch_core.declared.compute`."""
    return rule.op == "product" and rule.dtype.is_complex


def _not_mapped(place: Place) -> Tensor:
    raise AssertionError("nothing is read where it is")
