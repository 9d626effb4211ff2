"""What one node does of a call: alone, from values that came along, through staging buffers, or on a GPU.

A part is a generator. It yields the number of an exchange that it can't go on without, after it has set
:attr:`Call.awaited`, the nodes that have to reach it. It runs in inference mode, and on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dtorch_core._copies import cloned
from dtorch_core.declared import Declared, Place, Result, at_risk, compute
from dtorch_core.joint import Offer, Task
from dtorch_core.reduction import Rule
from dtorch_file_store import arena, offers
from dtorch_file_store.calls import Call
from dtorch_file_store.gpu_parts import GpuParts
from dtorch_file_store.node import Node
from dtorch_file_store.offers import Brought
from dtorch_file_store.staged import Flat, Staged
from dtorch_file_store.staging import Plan
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame

_LINE_BYTES = 64
"""The halves of a buffer begin at cache lines."""


_MOST = 1000
"""Forms of calls that are remembered."""


class Known(NamedTuple):
    """What follows from the notes and shapes of a call."""

    results: Sequence[Result]
    written: Sequence[Place]
    plan: Plan | None
    """How to go through buffers; None if every value comes along."""


class Parts:
    """This node's parts in the calls of one opening."""

    def __init__(
        self,
        node: Node,
        memory: arena.Arena,
        mapping: Callable[[int, int], arena.Mapping],
        gpu: GpuParts,
        calls: Mapping[str, Call],
    ) -> None:
        """
        :param mapping: a node's segment.
        :param calls: those that have not ended, by key.
        """
        self._node, self._memory, self._mapping, self._gpu, self._calls = node, memory, mapping, gpu, calls
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], Known] = {}
        self._lent: dict[str, tuple[arena.Block, set[int]]] = {}
        """This node's staging buffers, and the nodes that may still read them."""
        node.handlers["parted"] = self._on_parted

    def of(self, call: Call) -> Iterator[int]:
        """This node's part of a call for which all ranks have come."""
        node, work = self._node, call.work
        brought = [offer for offer in call.offers if offer is not None]
        call.notes = [offer.note for offer in brought]
        assert work is not None, "a rank of this node has come"
        if any([offer.ready is not None for offer in brought]):
            yield from self._gpu.of(call, brought)
            return

        if not node.links:
            for task in work([Offer(rank, offer.note, tuple(offer.tensors)) for rank, offer in enumerate(brought)]):
                task()

            return

        if TYPE_CHECKING:
            assert isinstance(work, Declared), "other work is left to the four steps"

        known = self._known_of(work, call.notes, brought)
        call.written = known.written
        tensors = {rank: brought[rank].tensors for rank in node.own_ranks}
        if known.plan is None:
            _from_values(known.results, brought, tensors)
        else:
            yield from self._through_buffers(call, known.results, known.plan, tensors)

    def ended(self, call: Call) -> None:
        """A call has ended here: it reads nothing of the others any more. Under the mutex."""
        if call.halves or call.key in self._lent or call.error is not None:
            self._node.tell_all(frame("parted", call.key), lazily=True)

        if call.key in self._lent:
            self._give_back(call.key, None)

    def node_gone(self, node: int) -> None:
        """A node reads nothing any more. Under the mutex."""
        for key in list(self._lent):
            self._give_back(key, node)

    def _known_of(self, work: Declared, notes: Sequence[str], brought: Sequence[Brought]) -> Known:
        """What follows from the notes and shapes of a call, worked out once for all calls that are alike."""
        form = tuple(notes), tuple([offer.form.text for offer in brought])
        known = self._known.get(form)
        if known is None:
            shapes = [offer.form.shapes for offer in brought]
            results = work.results(notes, shapes)
            written = [place for result in results for place in result.targets]
            small = all(offer.form.small for offer in brought)
            if small and not any(_rounds_by_place(result.rule) for result in results):
                known = Known(results, written, None)
            else:
                known = Known(results, written, Plan(results, shapes, self._node.homes))

            if len(self._known) >= _MOST:
                self._known.clear()

            self._known[form] = known

        return known

    def _through_buffers(
        self, call: Call, results: Sequence[Result], plan: Plan, tensors: dict[int, Sequence[Tensor]]
    ) -> Iterator[int]:
        node = self._node
        flat = Flat(results, tensors)
        half = -(-plan.half_bytes // _LINE_BYTES) * _LINE_BYTES
        halves: dict[int, Sequence[Tensor]] = {}
        place = (0, 0, 0)
        if half:
            block = self._memory.allocate(2 * half)
            with node.mutex:
                self._lent[call.key] = block, set(node.links) - node.gone - call.parted

            place = block.segment, block.offset, half
            halves[node.index] = block.bytes().split(half)

        call.awaited = list(node.links)
        staged = Staged(plan, node.index, flat, halves, _not_mapped, 0)
        staging: Sequence[Task] = staged.stage(0)
        computing: Sequence[Task] = ()
        for number in range(plan.steps):
            for task in staging:
                task()

            with node.mutex:
                node.tell_all(frame("staged", call.key, number, *(place if number == 0 else ())))

            node.send()
            # What is next is laid out while the words travel.
            computing = staged.compute(number) if number else ()
            staging = staged.stage(number + 1) if number + 1 < plan.steps else ()
            if not node.look_for(partial(_all_have_come, call, number)):
                yield number

            if number == 0:
                for peer, (segment, offset, size) in call.halves.items():
                    if size:
                        halves[peer] = self._mapping(peer, segment).bytes(offset, 2 * size).split(size)

                computing = staged.compute(0)

            for task in computing:
                task()

        flat.finish()

    def _give_back(self, key: str, node: int | None) -> None:
        lent = self._lent.get(key)
        if lent is not None:
            block, readers = lent
            readers.discard(-1 if node is None else node)
            if not readers and key not in self._calls:
                del self._lent[key]
                block.release()

    def _on_parted(self, peer: int, message: Message) -> Iterable[Waiter]:
        (key,) = message.fields
        call = self._calls.get(key)
        if call is not None:
            call.parted.add(peer)

        self._give_back(key, peer)
        return ()


def _from_values(results: Sequence[Result], brought: Sequence[Brought], tensors: dict[int, Sequence[Tensor]]) -> None:
    """Write all that this node's ranks get: every value is here."""
    given: list[Any] = [offers.values(offer) for offer in brought]
    for rank, number in at_risk(results, tensors):
        given[rank] = list(given[rank])
        given[rank][number] = cloned(tensors[rank][number])

    for result in results:
        targets = [tensors[rank][number] for rank, number in result.targets if rank in tensors]
        if targets:
            compute(result.rule, result.factor, [given[rank][number] for rank, number in result.sources], targets)


def _rounds_by_place(rule: Rule | None) -> bool:
    """Only whoever computes it knows the last bits: see :func:`dtorch_core.declared.compute`."""
    return rule is not None and rule.op == "product" and rule.dtype.is_complex


def _all_have_come(call: Call, number: int) -> bool:
    return not call.halted(number)


def _not_mapped(place: Place) -> Tensor:
    raise AssertionError("nothing is read where it is")
