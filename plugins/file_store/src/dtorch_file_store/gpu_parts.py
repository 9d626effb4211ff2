"""Collectives of processes that share a GPU: one node does the work for all, on tensors that it maps.

Each switch of the GPU between two processes costs more than a small collective. So nobody but the first node touches
the tensors: it waits on the device for what the others' streams have queued, works, and they wait for that. Only where
it can't map a tensor, the tensor's owner brings a copy, and takes the result back out of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dtorch_core import AbortedError, UnsupportedOperationError, streams
from dtorch_core._copies import copy_into
from dtorch_core.declared import Declared
from dtorch_core.joint import Offer, Work
from dtorch_file_store.calls import Call, Held
from dtorch_file_store.cuda.current import on
from dtorch_file_store.gpu import Gpu
from dtorch_file_store.node import Node
from dtorch_file_store.offers import Brought, form_of
from dtorch_file_store.wire import frame


class GpuParts:
    """This node's parts in calls with CUDA tensors."""

    def __init__(self, node: Node, gpu: Gpu) -> None:
        self._node, self._gpu = node, gpu
        self._returning = threading.Lock()

    def offered(self, offer: Offer, queue: torch.cuda.Stream, work: Work) -> tuple[Brought, list[Any], Held]:
        """An offer of this process, and what others need to know of it.

        :raises UnsupportedOperationError: if others can't map its memory, and the work can't be done on copies.
        """
        node, gpu, form = self._node, self._gpu, form_of(offer.tensors)
        ready = queue.record_event() if gpu.shared else queue
        brought = Brought(offer.note, form, offer.tensors, ready=ready)
        held = Held(offer.tensors)
        if not node.links:
            return brought, [], held

        tickets: list[Any] = []
        if node.index != self._worker:
            gpu.tell_freed()
            offers = [gpu.offer(tensor, queue) for tensor in offer.tensors]
            tickets = [ticket for ticket, _ in offers]
            copies = [copy for _, copy in offers]
            if any(copy is not None for copy in copies):
                held = Held(offer.tensors, copies)
                if not isinstance(work, Declared):
                    self._give_back(held, queue)
                    raise UnsupportedOperationError(
                        f"{node.presence.label}: what rank {offer.rank} brings can't be mapped by other processes (it "
                        f"is in an expandable segment, or not its own), and this work can't be done on copies"
                    )

        return brought, [offer.note, form.text, tickets, gpu.mark(queue)], held

    def withdraw(self, held: Held, queue: torch.cuda.Stream) -> None:
        """An offer was refused: its copies are not needed."""
        if held.copies:
            self._give_back(held, queue)

    def of(self, call: Call, brought: Sequence[Brought]) -> Iterator[int]:
        """As :meth:`Parts.of`."""
        node, gpu, work, queue = self._node, self._gpu, call.work, call.queue
        assert work is not None, "a rank of this node has come"
        if queue is None or any(offer.ready is None for offer in brought):
            # Some have brought CPU tensors, or none at all: then they do not mean the same.
            if isinstance(work, Declared):
                work.results(call.notes, [offer.form.shapes for offer in brought])

            raise RuntimeError("some ranks have brought CUDA tensors, and some have not")

        if node.index != self._worker:
            if isinstance(work, Declared) and any(held.copies for held in call.held.values()):
                results = work.results(call.notes, [offer.form.shapes for offer in brought])
                call.written = [place for result in results for place in result.targets]

            call.awaited = [self._worker]
            yield 0
            return

        mapped = []
        for rank, offer in enumerate(brought):
            if node.is_near(rank):
                mapped.append(Offer(rank, offer.note, tuple(offer.tensors)))
            else:
                home, mark = offer.ready
                gpu.check_alive(home, mark)
                theirs = tuple([gpu.tensor(home, ticket) for ticket in offer.tickets])
                mapped.append(Offer(rank, offer.note, theirs))

        try:
            gpu.order(queue, [offer.ready for offer in brought])
            with on(queue):
                for task in work(mapped):
                    task()
        finally:
            # Also where it failed: something may have been queued.
            call.done = (queue.record_event(),)

        if node.links:
            mark = gpu.mark(queue)
            with node.mutex:
                node.tell_all(frame("worked", call.key, mark))

            node.send()

    def order_after(self, call: Call, rank: int, queue: torch.cuda.Stream) -> None:
        """Make a rank's stream wait for the work."""
        if queue is not call.queue or self._node.index != self._worker:
            self._gpu.order(queue, call.done)  # the work is on that very stream

        held = call.held.get(rank)
        if held is not None and not held.copies:
            held = call.held.pop(rank, None)
            for tensor in held.tensors if held is not None else ():
                streams.keep_until_done(tensor, queue)
        elif held is not None or rank in call.returned:
            with self._returning:
                held = call.held.pop(rank, None)
                if held is not None:
                    self._take_back(call, rank, held, queue)
                else:
                    queue.wait_event(call.returned[rank])

    def drop(self, call: Call, rank: int) -> None:
        """A rank has dropped its ticket without having waited. Called by finalizers, anywhere: takes no lock."""
        call.dropped.add(rank)
        if call.finished:
            self.abandon(call)

    def abandon(self, call: Call) -> None:
        """The memory of ranks that do not wait is not handed out before the work is done."""
        self._node.jobs.append(lambda: self._abandon(call))

    def _abandon(self, call: Call) -> None:
        for rank in call.dropped & call.held.keys():
            held = call.held.get(rank)
            if held is not None:
                try:
                    self.order_after(call, rank, self._gpu.side(held.tensors[0].device))
                except AbortedError:  # closed meanwhile: nobody can say when the work is done
                    self._gpu.leave([held])

    def _take_back(self, call: Call, rank: int, held: Held, queue: torch.cuda.Stream) -> None:
        """Bring the results from the copies, if the work was done."""
        written = {place.number for place in call.written if place.rank == rank and call.error is None}
        with on(queue):
            for number, (tensor, copy) in enumerate(zip(held.tensors, held.copies, strict=True)):
                if copy is not None and number in written:
                    with torch.inference_mode(tensor.is_inference()):
                        copy_into(tensor, copy)

        call.returned[rank] = queue.record_event()
        self._give_back(held, queue)

    def _give_back(self, held: Held, queue: torch.cuda.Stream) -> None:
        for tensor, copy in zip(held.tensors, held.copies, strict=True):
            streams.keep_until_done(tensor, queue)
            if copy is not None:
                self._gpu.copies(copy.device).give_back(copy, queue)

    @property
    def _worker(self) -> int:
        return self._node.homes[0]
