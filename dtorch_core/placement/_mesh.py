"""A mesh as the ranks agree on it: a shape, and the rank at each place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from dtorch_core._text import did_you_mean, rank_list

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Coordinate: TypeAlias = tuple[int, ...]
"""One index for each mesh dimension."""

MeshLike: TypeAlias = "Sequence[Any] | Tensor | DeviceMesh"
"""Ranks as nested sequences of ints or an int tensor, or a DeviceMesh; of that only ``mesh`` and the names are read."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid. A rank has one place, or none."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Row-major."""
    names: tuple[str, ...] = field(default=(), compare=False)
    """One for each dimension, or none at all."""

    @classmethod
    def read(cls, mesh: MeshLike, world_size: int | None, what: str) -> Mesh:
        """Take a mesh as callers write it.

        :param world_size: how many ranks there are; None where that is not known.
        :param what: begins every message.
        :raises TypeError: if it is none of the kinds of :data:`MeshLike`.
        :raises ValueError: if it is ragged or has no dimension, or a rank is twice in it or not of this world.
        """
        # A DeviceMesh by its attributes: importing its module starts much more of torch than is needed here.
        values: Any = getattr(mesh, "mesh", mesh)
        names = getattr(mesh, "mesh_dim_names", None)
        if isinstance(values, Tensor):
            values = values.tolist()

        if not _is_row(values):
            raise TypeError(
                f"{what}: mesh must be nested sequences of ranks, an int tensor with at least one dimension or a "
                f"DeviceMesh, not {mesh!r}"
            )

        shape, ranks = _flatten(values, what)
        outside = {rank for rank in ranks if rank < 0 or world_size is not None and rank >= world_size}
        if outside:
            there = "ranks count from rank 0" if world_size is None else f"there are rank 0 to rank {world_size - 1}"
            raise ValueError(f"{what}: the mesh {values} has {rank_list(outside)}, but {there}")

        twice = {rank for rank in ranks if ranks.count(rank) > 1}
        if twice:
            raise ValueError(f"{what}: the mesh {values} has {rank_list(twice)} twice; a rank has one place in a mesh")

        return cls(shape, ranks, tuple(names or ()))

    def coordinates(self) -> Iterator[Coordinate]:
        """Every place, row-major."""
        return itertools.product(*(range(size) for size in self.shape))

    def place(self, rank: int) -> Coordinate:
        """Where ``rank`` is.

        :raises ValueError: if it is not in the mesh.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the {self}")

        index, place = self.ranks.index(rank), []
        for size in reversed(self.shape):
            index, here = divmod(index, size)
            place.append(here)

        return tuple(reversed(place))

    def rank_at(self, place: Coordinate) -> int:
        """The rank at a place."""
        index = 0
        for size, here in zip(self.shape, place, strict=True):
            index = index * size + here

        return self.ranks[index]

    def places_along(self, place: Coordinate, dims: Sequence[int]) -> list[Coordinate]:
        """The places that differ from ``place`` in the mesh dimensions ``dims`` alone, row-major; itself too."""
        return list(
            itertools.product(
                *(range(size) if dim in dims else (place[dim],) for dim, size in enumerate(self.shape))
            )
        )

    def line(self, rank: int, dim: int | str) -> list[int]:
        """The ranks that differ from ``rank`` in one mesh dimension alone, in order; itself too.

        :param dim: a number, counted from the end where negative, or a name.
        :raises TypeError: if ``dim`` is neither.
        :raises ValueError: if the mesh has no such rank or dimension.
        """
        return [self.rank_at(place) for place in self.places_along(self.place(rank), [self._number(dim)])]

    def describe_dim(self, dim: int) -> str:
        """``"mesh dimension 1 ('tp')"``."""
        name = f" ({self.names[dim]!r})" if dim < len(self.names) else ""
        return f"mesh dimension {dim}{name}"

    def _number(self, dim: int | str) -> int:
        if isinstance(dim, str):
            if dim not in self.names:
                known = f"has the dimensions {', '.join(map(repr, self.names))}" if self.names else "has no names"
                raise ValueError(f"the {self} {known}, and no dimension {dim!r}.{did_you_mean(dim, self.names)}")

            return self.names.index(dim)

        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"a mesh dimension is a number or a name, not {dim!r}")

        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(
                f"the {self} has no dimension {dim}, but {-len(self.shape)} to {len(self.shape) - 1}"
            )

        return dim % len(self.shape)

    def __str__(self) -> str:
        rows: list[Any] = list(self.ranks)
        for size in reversed(self.shape[1:]):
            rows = [rows[start : start + size] for start in range(0, len(rows), size)]

        return f"mesh {rows}"


def _is_row(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _flatten(values: Sequence[Any], what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and row-major ranks of nested sequences."""
    shape: list[int] = []
    level: list[Any] = [values]
    while all(_is_row(part) for part in level):
        sizes = {len(part) for part in level}
        if len(sizes) != 1:
            raise ValueError(f"{what}: the mesh {values} is ragged: parts of {sorted(sizes)} ranks beside each other")

        shape.append(sizes.pop())
        level = [item for part in level for item in part]
        if not level:
            raise ValueError(f"{what}: the mesh {values} has no rank")

    for rank in level:
        if _is_row(rank):
            raise ValueError(f"{what}: the mesh {values} is ragged: a rank beside a row of ranks")

        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"{what}: a mesh holds ranks as ints, not {rank!r}")

    assert prod(shape) == len(level)
    return tuple(shape), tuple(level)
