"""Where the pieces of every layout lie that a tensor has on its way, also where its shards are of uneven sizes.

A mesh dimension that cuts a tensor dimension as it did in the source, inside of the same cuts, keeps the source's
sizes. Every other cut is as ``torch.chunk`` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtorch_core.placement._mesh import Coordinate, Mesh
from dtorch_core.placement._placements import Specs
from dtorch_core.placement._search import common, cutters
from dtorch_core.placement._shards import Box, chunk, fit, relative, shape_of
from dtorch_core.placement._steps import RedistributionPlan, Step


@dataclass(frozen=True, slots=True)
class Moves:
    """What one rank gives and gets in one step."""

    shape: tuple[int, ...]
    """Of what it has afterwards."""
    gives: tuple[Box, ...]
    """The region of what it has before that each rank of its line is given. Of an empty one only the shape counts."""
    gets: tuple[Box, ...]
    """The region of what it has afterwards that comes from each."""


class Geometry:
    """The boxes of one tensor, counted from the corner of what the ranks of one span hold together."""

    def __init__(
        self,
        plan: RedistributionPlan,
        shape: Sequence[int],
        boxes: Mapping[Coordinate, Box] | None = None,
        fixed: frozenset[int] = frozenset(),
    ) -> None:
        """
        :param shape: of what the ranks of the span hold together.
        :param boxes: of the source, by the coordinates in the span; None where they are torch.chunk's.
        :param fixed: mesh dimensions to leave out: ``shape`` is what they have made already.
        """
        self._plan = plan
        self._shape = tuple(shape)
        self._boxes = boxes or {}
        self._fixed = fixed
        self._moves: dict[tuple[Step, Coordinate], Moves] = {}

    def box(self, specs: Specs, place: Coordinate) -> Box:
        """What the rank at ``place`` holds in a layout on the way."""
        return tuple(self._interval(dim, specs, place) for dim in range(len(self._shape)))

    def moves(self, step: Step, place: Coordinate) -> Moves:
        """What the rank at ``place`` gives and gets."""
        known = self._moves.get((step, place))
        if known is None:
            known = self._moves[step, place] = self._find_moves(step, place)

        return known

    def _find_moves(self, step: Step, place: Coordinate) -> Moves:
        before, after = self.box(step.before, place), self.box(step.after, place)
        gives, gets = [], []
        for other in self._plan.mesh.places_along(place, step.dims):
            theirs, wanted = self.box(step.before, other), self.box(step.after, other)
            gives.append(relative(_meet(before, wanted), before))
            gets.append(relative(_meet(theirs, after), after))

        return Moves(shape_of(after), tuple(gives), tuple(gets))

    def _interval(self, dim: int, specs: Specs, place: Coordinate) -> tuple[int, int]:
        cuts = [number for number in cutters(specs, dim) if number not in self._fixed]
        start, stop, kept = 0, self._shape[dim], 0
        if self._boxes:
            span = self._plan.span
            source = [number for number in cutters(self._plan.src, dim) if number in span]
            kept = common(source, cuts)
            where = [(span.index(number), place[number]) for number in cuts[:kept]]
            held = [box[dim] for cell, box in self._boxes.items() if all(cell[n] == index for n, index in where)]
            start, stop = min(begin for begin, _ in held), max(end for _, end in held)

        for number in cuts[kept:]:
            start, stop = chunk(start, stop, self._plan.mesh.shape[number], place[number])

        return start, stop


def _meet(one: Box, other: Box) -> Box:
    """What is in both. It may be empty, and then lie in neither."""
    starts = [max(a, c) for (a, _), (c, _) in zip(one, other, strict=True)]
    stops = [min(b, d) for (_, b), (_, d) in zip(one, other, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


@lru_cache(maxsize=1024)
def of_shape(plan: RedistributionPlan, shape: tuple[int, ...]) -> Geometry:
    """Of a tensor of ``shape`` whose shards are torch.chunk's."""
    return Geometry(plan, shape)


@lru_cache(maxsize=1024)
def of_piece(plan: RedistributionPlan, shape: tuple[int, ...]) -> Geometry:
    """Where no step depends on what other ranks hold: from the shape of what one rank holds, as all of its lines do."""
    return Geometry(plan, shape, fixed=plan.fixed)


@lru_cache(maxsize=1024)
def of_pieces(
    plan: RedistributionPlan, shapes: tuple[tuple[int, ...], ...], ranks: tuple[int, ...], what: str
) -> Geometry:
    """From the shapes that the ranks of a span have told each other, in their order.

    :param what: begins every message.
    :raises CollectiveMismatchError: if the pieces don't fit together; it names two ranks that disagree.
    """
    mesh = Mesh(tuple(plan.mesh.shape[number] for number in plan.span), ranks)
    specs = tuple(plan.src[number] for number in plan.span)
    places = list(mesh.coordinates())
    held = dict(zip(places, shapes, strict=True))
    shape, boxes = fit(held, mesh, specs, dict(zip(places, ranks, strict=True)), what)
    return Geometry(plan, shape, boxes, plan.fixed)
