"""A mesh as the ranks agree on it: a shape, and the rank at each place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from dtorch_core._text import rank_list

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
    def read(cls, mesh: MeshLike, world_size: int, what: str) -> Mesh:
        """Take a mesh as callers write it.

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
        outside = {rank for rank in ranks if not 0 <= rank < world_size}
        if outside:
            raise ValueError(
                f"{what}: the mesh {values} has {rank_list(outside)}, but the store has rank 0 to rank {world_size - 1}"
            )

        twice = {rank for rank in ranks if ranks.count(rank) > 1}
        if twice:
            raise ValueError(f"{what}: the mesh {values} has {rank_list(twice)} twice; a rank has one place in a mesh")

        return cls(shape, ranks, tuple(names or ()))

    def coordinates(self) -> Iterator[Coordinate]:
        """Every place, row-major."""
        return itertools.product(*(range(size) for size in self.shape))

    def describe_dim(self, dim: int) -> str:
        """``"mesh dimension 1 ('tp')"``."""
        name = f" ({self.names[dim]!r})" if dim < len(self.names) else ""
        return f"mesh dimension {dim}{name}"

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
