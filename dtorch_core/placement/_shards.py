"""Which part of a tensor a place in a mesh holds, as boxes: one interval for each tensor dimension."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from dtorch_core.errors import CollectiveMismatchError
from dtorch_core.placement._mesh import Coordinate, Mesh
from dtorch_core.placement._placements import Specs

Box: TypeAlias = tuple[tuple[int, int], ...]
"""``(start, stop)`` in each tensor dimension."""


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The size in each dimension."""
    return tuple(stop - start for start, stop in box)


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Part ``index`` of an interval cut as ``torch.chunk`` does: equal parts, a smaller one, then empty ones."""
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def chunk_box(shape: Sequence[int], mesh: Mesh, specs: Specs, coordinate: Coordinate) -> Box:
    """What the place at ``coordinate`` holds of a tensor of ``shape``. ``specs`` are resolved.

    Several mesh dimensions on one tensor dimension cut it in turn, the first one into the longest parts.
    """
    intervals = list(whole(shape))
    for spec, parts, index in zip(specs, mesh.shape, coordinate, strict=True):
        if spec.kind == "Shard":
            intervals[spec.dim] = chunk(*intervals[spec.dim], parts, index)

    return tuple(intervals)


def overlap(one: Box, other: Box) -> Box | None:
    """What is in both; None if no element is."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def relative(region: Box, box: Box) -> Box:
    """``region``, counted from the corner of ``box``."""
    return tuple((start - corner, stop - corner) for (start, stop), (corner, _) in zip(region, box, strict=True))


def view(tensor: Tensor, region: Box) -> Tensor:
    """The part of ``tensor`` that ``region`` names; no copy."""
    for dim, (start, stop) in enumerate(region):
        if (start, stop) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, stop - start)

    return tensor


def fit(
    shapes: Mapping[Coordinate, Sequence[int]], mesh: Mesh, specs: Specs, holder: Mapping[Coordinate, int], what: str
) -> tuple[tuple[int, ...], dict[Coordinate, Box]]:
    """The shape of the whole, and the box of each piece. Shards may have any sizes that make a grid.

    :param shapes: the shape of the piece at each coordinate; 0 where the mesh dimension is replicated.
    :param specs: resolved.
    :param holder: the rank that holds each piece, for messages.
    :raises CollectiveMismatchError: if the pieces don't fit together; it names two ranks that disagree.
    """
    ndims = {len(shape): cell for cell, shape in shapes.items()}
    if len(ndims) > 1:
        (one, first), (other, second) = list(ndims.items())[:2]
        raise CollectiveMismatchError(
            f"{what}: the pieces don't fit together: rank {holder[first]} has {one} dimensions (shape "
            f"{list(shapes[first])}), rank {holder[second]} has {other} (shape {list(shapes[second])})"
        )

    ndim = next(iter(ndims))
    intervals: dict[Coordinate, list[tuple[int, int]]] = {cell: [] for cell in shapes}
    total = []
    for dim in range(ndim):
        cutters = [number for number, spec in enumerate(specs) if spec.kind == "Shard" and spec.dim == dim]
        starts, size = _cuts(shapes, dim, cutters, mesh, holder, what)
        total.append(size)
        for cell, shape in shapes.items():
            start = starts[tuple(cell[number] for number in cutters)]
            intervals[cell].append((start, start + shape[dim]))

    return tuple(total), {cell: tuple(box) for cell, box in intervals.items()}


def _cuts(
    shapes: Mapping[Coordinate, Sequence[int]],
    dim: int,
    cutters: Sequence[int],
    mesh: Mesh,
    holder: Mapping[Coordinate, int],
    what: str,
) -> tuple[dict[Coordinate, int], int]:
    """Where each part of one tensor dimension begins, by its place on the mesh dimensions that cut it; and the end."""
    first: dict[Coordinate, Coordinate] = {}
    for cell, shape in shapes.items():
        place = tuple(cell[number] for number in cutters)
        other = first.setdefault(place, cell)
        if shapes[other][dim] != shape[dim]:
            names = " and ".join(mesh.describe_dim(number) for number in cutters)
            reason = f"they have the same place on {names}, which cuts it" if cutters else "nothing cuts it"
            raise CollectiveMismatchError(
                f"{what}: the pieces don't fit together: rank {holder[other]} has shape {list(shapes[other])} and rank "
                f"{holder[cell]} {list(shape)}; their sizes in dimension {dim} must be equal, since {reason}"
            )

    starts, size = {}, 0
    for place in itertools.product(*(range(mesh.shape[number]) for number in cutters)):
        starts[place] = size
        size += shapes[first[place]][dim]

    return starts, size
