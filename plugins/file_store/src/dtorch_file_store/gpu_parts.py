"""Collectives of processes that share a GPU: one node does the work for all, on tensors that it maps.

Each switch of the GPU between two processes costs more than a small collective. So nobody but the first node touches
the tensors: it waits on the device for what the others' streams have queued, works, and they wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dtorch_core import streams
from dtorch_core.declared import Declared
from dtorch_core.joint import Offer
from dtorch_file_store.calls import Call
from dtorch_file_store.gpu import Gpu
from dtorch_file_store.node import Node
from dtorch_file_store.offers import Brought, form_of
from dtorch_file_store.wire import frame


class GpuParts:
    """This node's parts in calls with CUDA tensors."""

    def __init__(self, node: Node, gpu: Gpu) -> None:
        self._node, self._gpu = node, gpu

    def offered(self, offer: Offer, queue: torch.cuda.Stream) -> tuple[Brought, list[Any]]:
        """An offer of this process, and what others need to know of it.

        :raises UnsupportedOperationError: if its memory can't be mapped.
        """
        form = form_of(offer.tensors)
        brought = Brought(offer.note, form, False, offer.tensors, ready=queue.record_event())
        if not self._node.links:
            return brought, []

        tickets = self._gpu.tickets(offer.tensors)
        mark = list(self._gpu.mark(queue))
        return brought, [offer.note, form.text, tickets, mark]

    def of(self, call: Call, brought: Sequence[Brought]) -> Iterator[int]:
        """As :meth:`Parts.of`."""
        node, gpu = self._node, self._gpu
        worker = node.homes[0]
        if node.index != worker:
            call.awaited = [worker]
            yield 0
            return

        work, queue = call.work, call.queue
        assert work is not None, "a rank of this node has come"
        if queue is None or any(offer.ready is None for offer in brought):
            # Some have brought CPU tensors, or none at all: then they do not mean the same.
            if isinstance(work, Declared):
                work.results(call.notes, [offer.form.shapes for offer in brought])

            raise RuntimeError("some ranks have brought CUDA tensors, and some have not")

        try:
            gpu.order(queue, [offer.ready for offer in brought])
            mapped = [
                tuple(offer.tensors) if node.is_near(rank) else gpu.mapped(node.homes[rank], offer.tickets)
                for rank, offer in enumerate(brought)
            ]
            with torch.cuda.stream(queue):
                for task in work([Offer(rank, brought[rank].note, mine) for rank, mine in enumerate(mapped)]):
                    task()
        finally:
            # Also where it failed: something may have been queued.
            call.done = (queue.record_event(),)
            for tensors in call.held.values():
                for tensor in tensors:
                    streams.keep_until_done(tensor, queue)

        if node.links:
            mark = list(gpu.mark(queue))
            with node.mutex:
                node.tell_all(frame("worked", call.key, mark))

            node.after()

    def order_after(self, call: Call, rank: int, stream: torch.cuda.Stream | None) -> None:
        """Make a rank's stream wait for the work."""
        queue = stream if stream is not None else torch.cuda.current_stream()
        self._gpu.order(queue, call.done)
        for tensor in call.held.pop(rank, ()):
            streams.keep_until_done(tensor, queue)

    def drop(self, call: Call, rank: int) -> None:
        """A rank has dropped its ticket without having waited. Called by finalizers."""
        call.dropped.add(rank)
        if call.finished:
            self.abandon(call)

    def abandon(self, call: Call) -> None:
        """Its memory is not handed out before the work is done."""
        for rank in call.dropped & call.held.keys():
            self._gpu.keep_until(call.held.pop(rank), call.done)
