"""What each collective does to the tensors of all ranks: pure functions of the offers, run once for all of them.

``offers[r].tensors`` are rank r's, in the order that :mod:`dtorch_samedevice_group.group` posts them. A function does
small work at once and returns large work as tasks, which the ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from dtorch_core import CollectiveMismatchError
from dtorch_core._shapes import describe
from dtorch_core.joint import Offer
from dtorch_core.reduction import Rule
from dtorch_samedevice_group.blocks import Task, copies, cut

Collective = Callable[[Sequence[Offer]], Sequence[Task]]


def all_reduce(rule: Rule, factor: float | None = None) -> Collective:
    """Each rank's tensors are replaced by their reduction over the ranks."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        tasks: list[Task] = []
        for tensors in zip(*(offer.tensors for offer in offers), strict=True):
            tasks += [partial(_reduce_in_place, rule, block, factor) for block in cut(tensors) or [tensors]]

        return tasks

    return work


def reduce(rule: Rule, root: int, factor: float | None = None) -> Collective:
    """The root's tensor is replaced by the reduction; the others' are left alone."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        inputs = [offer.tensors[0] for offer in offers]
        return _reductions(rule, [(inputs[root], inputs)], factor)

    return work


def reduce_scatter(rule: Rule, factor: float | None = None) -> Collective:
    """Rank r offers its output, then its input for each rank; output r is the reduction of every rank's input r."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        jobs = [
            (offer.tensors[0], [other.tensors[1 + offer.rank] for other in offers]) for offer in offers
        ]
        return _reductions(rule, jobs, factor)

    return work


def all_gather(offers: Sequence[Offer]) -> Sequence[Task]:
    """Rank r offers its input, then its output for each rank; every rank's output s is rank s's input."""
    return copies(
        [(offer.tensors[1 + source.rank], source.tensors[0]) for offer in offers for source in offers]
    )


def broadcast(root: int) -> Collective:
    """Every rank's tensors become the root's."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        return copies(
            [
                (target, source)
                for offer in offers
                if offer.rank != root
                for target, source in zip(offer.tensors, offers[root].tensors, strict=True)
            ]
        )

    return work


def gather(root: int) -> Collective:
    """Rank r offers its input; the root also its output for each rank."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        return _sent([(source, source.tensors[0], offers[root], 1 + source.rank) for source in offers])

    return work


def scatter(root: int) -> Collective:
    """Rank r offers its output; the root also its input for each rank."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        return _sent([(offers[root], offers[root].tensors[1 + offer.rank], offer, 0) for offer in offers])

    return work


def all_to_all(offers: Sequence[Offer]) -> Sequence[Task]:
    """Rank r offers its output from each rank, then its input for each; output s of rank r is input r of rank s."""
    size = len(offers)
    return _sent(
        [
            (source, source.tensors[size + offer.rank], offer, source.rank)
            for offer in offers
            for source in offers
        ]
    )


def _sent(messages: Sequence[tuple[Offer, Tensor, Offer, int]]) -> Sequence[Task]:
    """Copies from a source's tensor to a receiver's, the one at an index.

    :raises CollectiveMismatchError: if one does not fit the other: a copy would stretch or convert it.
    """
    pairs = []
    for source, tensor, receiver, index in messages:
        target = receiver.tensors[index]
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise CollectiveMismatchError(
                f"rank {source.rank} sends {describe(tensor)} to rank {receiver.rank}, which expects {describe(target)}"
            )

        pairs.append((target, tensor))

    return copies(pairs)


def _reduce_in_place(rule: Rule, tensors: Sequence[Tensor], factor: float | None) -> None:
    # Into the first, then from there, while the block is in cache: each input is read once, each output written once.
    first = tensors[0]
    rule.into(first, tensors, factor)
    for other in tensors[1:]:
        other.copy_(first)


def _reductions(
    rule: Rule, jobs: Sequence[tuple[Tensor, Sequence[Tensor]]], factor: float | None
) -> Sequence[Task]:
    tasks: list[Task] = []
    for out, inputs in jobs:
        blocks = cut((out, *inputs)) or [(out, *inputs)]
        tasks += [partial(_reduce_out, rule, block[0], block[1:], factor) for block in blocks]

    return tasks


def _reduce_out(rule: Rule, out: Tensor, inputs: Sequence[Tensor], factor: float | None) -> None:
    # An output that is one of the later inputs (in-place reduce_scatter) would be overwritten before it is read.
    if any(out.data_ptr() == tensor.data_ptr() for tensor in inputs[1:]):
        result = out.clone()
        rule.into(result, inputs, factor)
        out.copy_(result)
    else:
        rule.into(out, inputs, factor)
