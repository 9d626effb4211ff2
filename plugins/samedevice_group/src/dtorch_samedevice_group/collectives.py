"""What each collective does to the tensors of all ranks, said twice: as work on shared memory, and as its results.

``offers[r].tensors`` are rank r's, outputs first, in c10d's order; ``shapes[r]`` are theirs. The work says which of
them belong together; small work is then done at once, and large work comes as tasks, which the ranks share. The results
are for ranks in different processes, which each compute their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import Tensor

from dtorch_core import CollectiveMismatchError
from dtorch_core._shapes import describe
from dtorch_core.declared import Place, Result, Shapes
from dtorch_core.joint import Offer
from dtorch_core.reduction import Rule
from dtorch_samedevice_group import fused
from dtorch_samedevice_group.blocks import Job, Task, Tensors, copies, share
from dtorch_samedevice_group.fused_again import Again
from dtorch_samedevice_group.overlaps import meet
from dtorch_samedevice_group.recipes import recipe


class Collective(NamedTuple):
    """Pure functions of what the ranks offer; both raise CollectiveMismatchError if that does not fit together."""

    work: Callable[[Sequence[Offer]], Sequence[Task]]
    """Run once for all ranks."""
    results: Callable[[Shapes], Sequence[Result]]
    """Which tensor becomes what."""


def nothing() -> Collective:
    """A call that moves no tensor: that all have come is the point."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        return ()

    def results(shapes: Shapes) -> Sequence[Result]:
        return ()

    return Collective(work, results)


def all_reduce(rule: Rule, factor: float | None = None) -> Collective:
    """Each rank's tensors are replaced by their reduction over the ranks."""
    do, how, again = partial(_reduce_in_place, rule, factor), recipe(rule, factor), Again()
    copied = partial(_reduce_copies, rule, factor)

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        jobs: Sequence[Job] = _by_position(offers)
        tensors = jobs[0] if len(jobs) == 1 else _flat(jobs)
        fusible = how is not None and len(tensors) > 0 and fused.takes(tensors[0])
        where = again.where(tensors) if fusible else None
        if again.done(where, tensors):
            return ()

        if (len(jobs) > 1 and meet(tensors)) or _is_shared(jobs):
            # All is read before anything is written.
            return share([[*job, *[tensor.clone() for tensor in job]] for job in jobs], copied)

        if fusible and how is not None:
            jobs = again.left(where, partial(fused.reduce_in_place, how, jobs))
            if not jobs:
                return ()

        return share(jobs, do)

    def results(shapes: Shapes) -> Sequence[Result]:
        return [Result(column, column, rule, factor) for column in _columns(shapes)]

    return Collective(work, results)


def reduce(rule: Rule, root: int, factor: float | None = None) -> Collective:
    """The root's tensor is replaced by the reduction; the others' are left alone."""
    how = recipe(rule, factor)

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        (inputs,) = _by_position(offers)
        if how is not None and fused.takes(inputs[0]) and fused.reduce(how, inputs, [inputs[root]]):
            return ()

        return share([(inputs[root], *inputs)], partial(_reduce_out, rule, factor))

    def results(shapes: Shapes) -> Sequence[Result]:
        (inputs,) = _columns(shapes)
        return [Result([inputs[root]], inputs, rule, factor)]

    return Collective(work, results)


def reduce_scatter(rule: Rule, factor: float | None = None) -> Collective:
    """Rank r offers its output, then its input for each rank; output r is the reduction of every rank's input r."""
    how, again = recipe(rule, factor), Again()

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        ranks = [offer.tensors for offer in offers]
        fusible = how is not None and fused.takes(ranks[0][0])
        where = again.where(_flat(ranks)) if fusible else None
        if again.done(where, [mine[0] for mine in ranks]):
            return ()

        jobs: Sequence[Job] = [(mine[0], *[theirs[number] for theirs in ranks]) for number, mine in enumerate(ranks, 1)]
        if fusible and how is not None:
            jobs = again.left(where, partial(fused.reduce_each, how, jobs))
            if not jobs:
                return ()

        return share(jobs, partial(_reduce_out, rule, factor))

    def results(shapes: Shapes) -> Sequence[Result]:
        outputs, *inputs = _columns(shapes)
        return [Result([out], parts, rule, factor) for out, parts in zip(outputs, inputs, strict=True)]

    return Collective(work, results)


def all_gather() -> Collective:
    """Rank r offers its output for each rank, then its input; every rank's output s is rank s's input."""

    again = Again()

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        outputs = [tensor for offer in offers for tensor in offer.tensors[:-1]]
        if fused.takes(offers[0].tensors[-1]):
            ranks = [offer.tensors for offer in offers]
            where = again.where(_flat(ranks))
            if again.done(where, outputs):
                return ()

            jobs = [(mine[-1], *[theirs[number] for theirs in ranks]) for number, mine in enumerate(ranks)]
            return _copied(again.left(where, partial(fused.spread, jobs)))

        return copies(outputs, [offer.tensors[-1] for offer in offers] * len(offers))

    def results(shapes: Shapes) -> Sequence[Result]:
        *outputs, inputs = _columns(shapes)
        return [Result(targets, [source]) for targets, source in zip(outputs, inputs, strict=True)]

    return Collective(work, results)


def broadcast(root: int) -> Collective:
    """Every rank's tensors become the root's."""
    again = Again()

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        given, others = offers[root].tensors, [offer.tensors for offer in offers if offer.rank != root]
        if given and others and fused.takes(given[0]):
            written = _flat(others)
            where = again.where([*given, *written])
            if again.done(where, written):
                return ()

            jobs = [(tensor, *[theirs[number] for theirs in others]) for number, tensor in enumerate(given)]
            return _copied(again.left(where, partial(fused.spread, jobs)))

        return copies([tensor for tensors in others for tensor in tensors], given * len(others))

    def results(shapes: Shapes) -> Sequence[Result]:
        return [Result([*column[:root], *column[root + 1 :]], [column[root]]) for column in _columns(shapes)]

    return Collective(work, results)


def gather(root: int) -> Collective:
    """Rank r offers its input; the root, before that, its output for each rank."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        sources, targets = [offer.tensors[-1] for offer in offers], offers[root].tensors[:-1]
        _check_sent(sources, targets, lambda number: (number, root))
        if fused.takes(sources[0]) and fused.exchange([[source] for source in sources], [targets]):
            return ()

        return copies(targets, sources)

    def results(shapes: Shapes) -> Sequence[Result]:
        return _sent(shapes, [(Place(r, len(shapes[r]) - 1), Place(root, r)) for r in range(len(shapes))])

    return Collective(work, results)


def scatter(root: int) -> Collective:
    """Rank r offers its output; the root also its input for each rank."""

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        sources, targets = offers[root].tensors[1:], [offer.tensors[0] for offer in offers]
        _check_sent(sources, targets, lambda number: (root, number))
        if fused.takes(sources[0]) and fused.exchange([sources], [[target] for target in targets]):
            return ()

        return copies(targets, sources)

    def results(shapes: Shapes) -> Sequence[Result]:
        return _sent(shapes, [(Place(root, 1 + r), Place(r, 0)) for r in range(len(shapes))])

    return Collective(work, results)


def all_to_all(alike: bool) -> Collective:
    """Rank r offers its output from each rank, then its input for each; output s of rank r is input r of rank s.

    :param alike: this rank's tensors all have one shape, and its note says which.
    """

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        size, note = len(offers), offers[0].note
        ranks = [offer.tensors for offer in offers]
        sources = [theirs[number] for number in range(size, 2 * size) for theirs in ranks]
        targets = [tensor for mine in ranks for tensor in mine[:size]]
        if not (alike and all([offer.note == note for offer in offers])):
            _check_sent(sources, targets, lambda number: (number % size, number // size))

        if fused.takes(sources[0]) and fused.exchange([t[size:] for t in ranks], [t[:size] for t in ranks]):
            return ()

        return copies(targets, sources)

    def results(shapes: Shapes) -> Sequence[Result]:
        ranks = range(len(shapes))
        return _sent(shapes, [(Place(s, len(ranks) + r), Place(r, s)) for r in ranks for s in ranks])

    return Collective(work, results)


def together(collectives: Sequence[Collective], counts: Sequence[int]) -> Collective:
    """Several collectives as one; ``counts`` says how many of a rank's tensors belong to each."""
    spans = [slice(start, end) for start, end in pairwise(accumulate(counts, initial=0))]

    def work(offers: Sequence[Offer]) -> Sequence[Task]:
        return [
            task
            for each, span in zip(collectives, spans, strict=True)
            for task in each.work([offer._replace(tensors=offer.tensors[span]) for offer in offers])
        ]

    def results(shapes: Shapes) -> Sequence[Result]:
        return [
            result._replace(targets=_moved(result.targets, span.start), sources=_moved(result.sources, span.start))
            for each, span in zip(collectives, spans, strict=True)
            for result in each.results([mine[span] for mine in shapes])
        ]

    return Collective(work, results)


def _by_position(offers: Sequence[Offer]) -> list[Job]:
    """Every rank's first tensor, every rank's second one, and so on."""
    ranks = [offer.tensors for offer in offers]
    if len(ranks[0]) == 1:  # as a rule
        return [[tensor for (tensor,) in ranks]]

    return list(zip(*ranks, strict=True))


def _columns(shapes: Shapes) -> list[list[Place]]:
    """The same as places."""
    return [[Place(rank, number) for rank in range(len(shapes))] for number in range(len(shapes[0]))]


def _moved(places: Sequence[Place], by: int) -> Sequence[Place]:
    return [Place(place.rank, place.number + by) for place in places]


def _flat(rows: Sequence[Job]) -> list[Tensor]:
    return [tensor for row in rows for tensor in row]


def _copied(jobs: Sequence[Job]) -> Sequence[Task]:
    """Copy each job's first tensor to its others, on CUDA."""
    if not jobs:
        return ()

    return copies([target for job in jobs for target in job[1:]], [job[0] for job in jobs for _ in job[1:]])


def _check_sent(sources: Tensors, targets: Tensors, ranks_of: Callable[[int], tuple[int, int]]) -> None:
    """Of copies between ranks: of number n, ``ranks_of(n)`` is who sends and who receives.

    :raises CollectiveMismatchError: if one does not fit the other: a copy would stretch or convert it.
    """
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.shape != target.shape or source.dtype != target.dtype:
            raise _misfit(*ranks_of(number), describe(source), describe(target))


def _sent(shapes: Shapes, pairs: Sequence[tuple[Place, Place]]) -> Sequence[Result]:
    """The same as results, of the source and the target of each copy."""
    for source, target in pairs:
        sent, expected = shapes[source.rank][source.number], shapes[target.rank][target.number]
        if sent != expected:
            raise _misfit(source.rank, target.rank, f"{sent}", f"{expected}")

    return [Result([target], [source]) for source, target in pairs]


def _misfit(sender: int, receiver: int, sent: str, expected: str) -> CollectiveMismatchError:
    return CollectiveMismatchError(f"rank {sender} sends {sent} to rank {receiver}, which expects {expected}")


def _reduce_in_place(rule: Rule, factor: float | None, tensors: Job) -> None:
    # Into the first, then from there, while the block is in cache: each input is read once, each output written once.
    first = tensors[0]
    rule.into(first, tensors, factor)
    for other in tensors[1:]:
        other.copy_(first)


def _is_shared(jobs: Sequence[Job]) -> bool:
    """Ranks of one process have given the same tensor. Two of them are read before it is written."""
    return len(jobs) == 1 and len(jobs[0]) > 2 and len(set(map(Tensor.data_ptr, jobs[0]))) < len(jobs[0])


def _reduce_copies(rule: Rule, factor: float | None, job: Job) -> None:
    """Of tensors, then their copies: the tensors become the copies' reduction."""
    count = len(job) // 2
    first = job[count]
    rule.into(first, job[count:], factor)
    for tensor in job[:count]:
        tensor.copy_(first)


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
