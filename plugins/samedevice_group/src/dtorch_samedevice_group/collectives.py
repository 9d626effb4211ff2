"""What each collective does to the tensors of all ranks: pure functions of the offers, run once for all of them.

``offers[r].tensors`` are rank r's, outputs first, in c10d's order. A function says which of them belong together; small
work is then done at once, and large work comes as tasks, which the ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dtorch_core import CollectiveMismatchError
from dtorch_core._shapes import describe
from dtorch_core.joint import Offer
from dtorch_core.reduction import Rule
from dtorch_samedevice_group.blocks import Job, Task, Tensors, copies, share

Collective = Callable[[Sequence[Offer]], Sequence[Task]]


def all_reduce(rule: Rule, factor: float | None = None) -> Collective:
    """Each rank's tensors are replaced by their reduction over the ranks."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        return share(_by_position(offers), partial(_reduce_in_place, rule, factor))

    return work


def reduce(rule: Rule, root: int, factor: float | None = None) -> Collective:
    """The root's tensor is replaced by the reduction; the others' are left alone."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        (inputs,) = _by_position(offers)
        return share([(inputs[root], *inputs)], partial(_reduce_out, rule, factor))

    return work


def reduce_scatter(rule: Rule, factor: float | None = None) -> Collective:
    """Rank r offers its output, then its input for each rank; output r is the reduction of every rank's input r."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        outputs, *inputs = _by_position(offers)
        jobs = [(out, *parts) for out, parts in zip(outputs, inputs, strict=True)]
        return share(jobs, partial(_reduce_out, rule, factor))

    return work


def all_gather(offers: Sequence[Offer]) -> Sequence[Task]:
    """Rank r offers its output for each rank, then its input; every rank's output s is rank s's input."""
    outputs = [tensor for offer in offers for tensor in offer.tensors[:-1]]
    return copies(outputs, [offer.tensors[-1] for offer in offers] * len(offers))


def broadcast(root: int) -> Collective:
    """Every rank's tensors become the root's."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        given, others = offers[root].tensors, [offer.tensors for offer in offers if offer.rank != root]
        return copies([tensor for tensors in others for tensor in tensors], given * len(others))

    return work


def gather(root: int) -> Collective:
    """Rank r offers its input; the root, before that, its output for each rank."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        sources, targets = [offer.tensors[-1] for offer in offers], offers[root].tensors[:-1]
        return _send(sources, targets, lambda number: (number, root))

    return work


def scatter(root: int) -> Collective:
    """Rank r offers its output; the root also its input for each rank."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        sources, targets = offers[root].tensors[1:], [offer.tensors[0] for offer in offers]
        return _send(sources, targets, lambda number: (root, number))

    return work


def all_to_all(alike: bool) -> Collective:
    """Rank r offers its output from each rank, then its input for each; output s of rank r is input r of rank s.

    :param alike: this rank's tensors all have one shape, and its note says which.
    """

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        size, note = len(offers), offers[0].note
        sources = [source.tensors[size + target.rank] for target in offers for source in offers]
        targets = [target.tensors[source.rank] for target in offers for source in offers]
        if alike and all([offer.note == note for offer in offers]):
            return copies(targets, sources)

        return _send(sources, targets, lambda number: (number % size, number // size))

    return work


def _by_position(offers: Sequence[Offer]) -> list[Job]:
    """Every rank's first tensor, every rank's second one, and so on."""
    return list(zip(*[offer.tensors for offer in offers], strict=True))


def _send(sources: Tensors, targets: Tensors, ranks_of: Callable[[int], tuple[int, int]]) -> Sequence[Task]:
    """Copies between ranks: of number n, ``ranks_of(n)`` is who sends and who receives.

    :raises CollectiveMismatchError: if one does not fit the other: a copy would stretch or convert it.
    """
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.shape != target.shape or source.dtype != target.dtype:
            sender, receiver = ranks_of(number)
            raise CollectiveMismatchError(
                f"rank {sender} sends {describe(source)} to rank {receiver}, which expects {describe(target)}"
            )

    return copies(targets, sources)


def _reduce_in_place(rule: Rule, factor: float | None, tensors: Job) -> None:
    # Into the first, then from there, while the block is in cache: each input is read once, each output written once.
    first = tensors[0]
    rule.into(first, tensors, factor)
    for other in tensors[1:]:
        other.copy_(first)


def _reduce_out(rule: Rule, factor: float | None, job: Job) -> None:
    out, *inputs = job
    place = out.data_ptr()
    for tensor in inputs[1:]:
        if tensor.data_ptr() == place:  # in-place reduce_scatter: it would be overwritten before it is read
            result = out.clone()
            rule.into(result, inputs, factor)
            out.copy_(result)
            return

    rule.into(out, inputs, factor)
