"""The steps of a redistribution: what each does, over which ranks, and how much it moves.

Ranks that differ in the mesh dimensions of a step alone are a *line*: each line does the step on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias

import torch

from dtorch_core._text import count
from dtorch_core.placement._mesh import Coordinate, Mesh
from dtorch_core.placement._placements import Spec, Specs
from dtorch_core.placement._shards import chunk_box, overlap, shape_of

Kind: TypeAlias = Literal["slice", "pad", "mask", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]

LOCAL = {
    "slice": "each rank takes its part of what it has",
    "pad": "the neutral element around what each rank has",
    "mask": "the value on the first rank, the neutral element on the others",
}
"""The steps that need no other rank, and what they do."""


@dataclass(frozen=True, slots=True)
class Step:
    """One conversion, of one or several mesh dimensions at once."""

    kind: Kind
    dims: tuple[int, ...]
    """The mesh dimensions that the ranks of a line differ in; of a local step the one that is converted."""
    before: Specs
    after: Specs

    @property
    def communicates(self) -> bool:
        """Ranks have to talk to each other."""
        return self.kind not in LOCAL

    def received(self, mesh: Mesh, shape: Sequence[int]) -> int:
        """The elements that all ranks together receive from others, of a tensor of ``shape`` in torch.chunk's shards.

        Of a reduction what its best known algorithms need: each element of a result comes from n - 1 other ranks.
        """
        if not self.communicates:
            return 0

        others = prod(mesh.shape[dim] for dim in self.dims) - 1
        total = 0
        for place in mesh.coordinates():
            before, after = (chunk_box(shape, mesh, specs, place) for specs in (self.before, self.after))
            if self.kind == "reduce_scatter":
                total += others * prod(shape_of(after))
            elif self.kind == "all_reduce":
                # A reduce_scatter and an all_gather; over a whole line that is twice what one of them moves.
                total += 2 * others * prod(shape_of(before))
            else:
                kept = overlap(before, after)
                total += prod(shape_of(after)) - (prod(shape_of(kept)) if kept is not None else 0)

        return total // (others + 1) if self.kind == "all_reduce" else total


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank needs to know of its part in a plan."""

    place: Coordinate
    span: list[int]
    """The ranks that differ from it in the span alone, itself too."""
    lines: list[list[int] | None]
    """For each step the ranks of its line; None for a local one."""


class RedistributionPlan:
    """How a tensor gets from one layout to another on a mesh. ``str()`` of it is for people."""

    def __init__(
        self,
        mesh: Mesh,
        src: Specs,
        dst: Specs,
        steps: Sequence[Step],
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.mesh = mesh
        self.src = src
        self.dst = dst
        self.steps = tuple(steps)
        """In order. None for a layout that stays, or differs in mesh dimensions of one rank alone."""
        self.shape = shape
        """Of the whole tensor, if known."""
        self.dtype = dtype
        self._seats: dict[int, Seat] = {}

    @cached_property
    def collectives(self) -> tuple[Step, ...]:
        """The steps in which ranks communicate."""
        return tuple(step for step in self.steps if step.communicates)

    @cached_property
    def span(self) -> tuple[int, ...]:
        """The mesh dimensions whose ranks have to know where each other's pieces lie."""
        return tuple(sorted({dim for step in self.steps if step.kind not in ("slice", "mask") for dim in step.dims}))

    @cached_property
    def needs_sizes(self) -> bool:
        """Some step depends on the sizes of shards that other ranks hold."""
        return any(self.src[dim].kind == "Shard" for dim in self.span)

    @cached_property
    def fixed(self) -> frozenset[int]:
        """The mesh dimensions whose cut stays as it is from the beginning to the end."""
        return frozenset(
            dim for dim, spec in enumerate(self.src) if spec.kind == "Shard" and dim not in self.span
        )

    def lines(self, step: Step) -> list[list[int]]:
        """The ranks of each line, in order."""
        return list(map(list, dict.fromkeys(tuple(self._line(place, step.dims)) for place in self.mesh.coordinates())))

    def seat(self, rank: int) -> Seat:
        """Of a rank of the mesh."""
        known = self._seats.get(rank)
        if known is None:
            place = self.mesh.place(rank)
            lines = [self._line(place, step.dims) if step.communicates else None for step in self.steps]
            known = self._seats[rank] = Seat(place, self._line(place, self.span), lines)

        return known

    def _line(self, place: Coordinate, dims: Sequence[int]) -> list[int]:
        return [self.mesh.rank_at(other) for other in self.mesh.places_along(place, dims)]

    @cached_property
    def title(self) -> str:
        """From where to where."""
        return f"{_listed(self.src)} to {_listed(self.dst)} on the {self.mesh}"

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        what = "" if self.shape is None else f", shape {list(self.shape)}"
        what += "" if self.dtype is None else f", {str(self.dtype).removeprefix('torch.')}"
        number = len(self.collectives)
        total = self._moved(self.collectives) if number else ""
        yield f"{self.title}{what}: {count(number, 'communication step') if number else 'no communication'}{total}"
        if self.src == self.dst:
            yield "  -  the tensor itself"
        elif not self.steps:
            yield "  -  a copy"

        if self.needs_sizes:
            exchange = f"exchanged once, along {self._names(self.span)}"
            yield f"  -  sizes of shards: {'follow from the shape' if self.shape is not None else exchange}"

        numbers = iter(range(1, number + 1))
        for step in self.steps:
            change = f"{_listed(step.before)} to {_listed(step.after)}"
            if step.communicates:
                lines = " | ".join(", ".join(f"rank {rank}" for rank in line) for line in self.lines(step))
                yield f"  {next(numbers)}. {step.kind} along {self._names(step.dims)}: {change}{self._moved([step])}"
                yield f"     {lines}"
            else:
                yield f"  -  {step.kind} along {self._names(step.dims)}: {change}; local: {self._local(step)}"

    def _names(self, dims: Sequence[int]) -> str:
        return " and ".join(self.mesh.describe_dim(dim) for dim in dims)

    def _moved(self, steps: Sequence[Step]) -> str:
        """``", 12.6 MB"``: what the ranks receive of each other, all together."""
        if self.shape is None:
            return ""

        elements = sum(step.received(self.mesh, self.shape) for step in steps)
        return f", {count(elements, 'element')}" if self.dtype is None else f", {_size(elements * self.dtype.itemsize)}"

    def _local(self, step: Step) -> str:
        (dim,) = step.dims
        return "the value on every rank, for it is their mean" if step.after[dim].op == "avg" else LOCAL[step.kind]


def _size(value: int) -> str:
    unit, name = (1e6, "MB") if value >= 1e6 else (1e3, "kB")
    return f"{value / unit:.1f} {name}" if value >= 1e4 else count(value, "byte")


def _listed(specs: Sequence[Spec]) -> str:
    return f"[{', '.join(map(str, specs))}]"
