"""Joint work that says what it computes, so that ranks in different processes can each compute their own part.

A piece of :data:`~dtorch_core.joint.Work` needs the tensors of all ranks in one address space. Declared work can be
done without: it names its results by their sources, and :func:`compute` writes one result, or any block of it. What
it writes is bitwise what the work itself would write.

A store does declared work so: each process asks for the results and writes those whose targets its own ranks have
offered, in any order of results and blocks. What it owes is that no source is overwritten before it has been read,
here or by another process: :func:`at_risk` says which sources have to be copied for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtorch_core._copies import copy_into
from dtorch_core._memory import same_place, span
from dtorch_core._shapes import Shape
from dtorch_core.joint import Offer, Task
from dtorch_core.reduction import Rule


class Place(NamedTuple):
    """One of the tensors that the ranks have offered."""

    rank: int
    number: int
    """Which of the rank's tensors."""


class Result(NamedTuple):
    """One value, and all the tensors that become it. Its targets and sources have one shape and one dtype."""

    targets: Sequence[Place]
    sources: Sequence[Place]
    """In the order in which they are reduced: that of their ranks."""
    rule: Rule | None = None
    """None: there is one source, and it is copied."""
    factor: float | None = None


Shapes = Sequence[Sequence[Shape]]
"""Those of each rank's tensors, in rank order."""


class Declared(ABC):
    """Work that also says what it computes. A store may ask in each process; the answer is the same in all."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, offers: Sequence[Offer]) -> Sequence[Task]:
        """As :data:`~dtorch_core.joint.Work`."""

    @abstractmethod
    def results(self, notes: Sequence[str], shapes: Shapes) -> Sequence[Result]:
        """What the work computes, for ranks that bring these notes, in rank order. No target is named twice.

        :raises CollectiveMismatchError: as the work itself would, with the same text: if the ranks do not mean the same
            work, or what they bring does not fit together.
        """


def compute(rule: Rule | None, factor: float | None, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Write a result, or the same block of each of its tensors, to some of its targets.

    A target may be one of the sources, the very same view; no other memory may overlap. Sources may be copies. To be
    called in inference mode, in which tensors of both modes can be written, and no gradients are recorded.

    Blocks may be cut anywhere, but for products of complex numbers. Of those torch rounds the last few of a contiguous
    run in another way than the rest: cut at multiples of 64, and the bits still depend on layouts and on the number of
    torch's threads. Where processes must agree on them, one computes and the others copy.
    """
    if rule is None:
        (value,) = sources
    else:
        value = _room(rule, sources, targets)
        rule.into(value, sources, factor)

    for target in targets:
        if target is not value and not same_place(target, value):
            copy_into(target, value)


def _room(rule: Rule, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """A target in which the sources can be reduced; new memory if each of them is itself a source read late."""
    if len(sources) <= 2 or not rule.in_place:
        return targets[0]

    late = {source.data_ptr() for source in sources[2:]}
    for target in targets:
        if target.data_ptr() not in late:
            return target

    return torch.empty_like(targets[0])


def at_risk(results: Sequence[Result], tensors: Mapping[int, Sequence[Tensor]]) -> Sequence[Place]:
    """The sources that have to be copied before anything is written, among ``tensors``: those of one process's ranks.

    Safe is what no target overlaps, and what only a target of the same result is, as the very same view: reduced in
    place, or gathered from where it is gathered to. Such a source is overwritten block by block, each block after it
    has been read. A source that a target meets elsewhere, or a target of another result, may be overwritten before.
    Tensors that lie between each other without having an element in common count as overlapping.
    """
    if sum(map(len, tensors.values())) <= 1 or _are_apart(results, tensors):
        return ()

    spans = []
    for number, result in enumerate(results):
        for written, places in ((True, result.targets), (False, result.sources)):
            for place in places:
                if place.rank in tensors and (tensor := tensors[place.rank][place.number]).numel():
                    spans.append((*span(tensor), written, number, place))

    spans.sort()
    found: dict[Place, None] = {}
    for index, (_, end, written, number, place) in enumerate(spans):
        for other_start, _, other_written, other_number, other in spans[index + 1 :]:
            if other_start >= end:
                break

            if written == other_written or (number == other_number and _same(tensors, place, other)):
                continue

            found[other if written else place] = None

    return list(found)


def _are_apart(results: Sequence[Result], tensors: Mapping[int, Sequence[Tensor]]) -> bool:
    """All sources lie on one side of all targets: as a rule, and seen at once."""
    bounds: list[tuple[int, int]] = []
    for places in ([result.sources for result in results], [result.targets for result in results]):
        spans = [
            span(tensor)
            for each in places
            for place in each
            if place.rank in tensors and (tensor := tensors[place.rank][place.number]).numel()
        ]
        if not spans:
            return True

        bounds.append((min(start for start, _ in spans), max(end for _, end in spans)))

    (first, end), (other_first, other_end) = bounds
    return end <= other_first or other_end <= first


def _same(tensors: Mapping[int, Sequence[Tensor]], place: Place, other: Place) -> bool:
    return place == other or same_place(tensors[place.rank][place.number], tensors[other.rank][other.number])
