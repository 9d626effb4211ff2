"""Who gives what to whom in a conversion between two layouts. Every rank computes the same from what all of them know.

Places of the source that differ only in replicated mesh dimensions hold equal data: a *cell*. One rank of each cell,
its *provider*, serves the ranks that hold no copy themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from dtorch_core.placement._mesh import Coordinate, Mesh
from dtorch_core.placement._placements import Specs, partial_op


@dataclass(frozen=True, slots=True)
class Side:
    """A layout: the source's or the target's."""

    mesh: Mesh
    specs: Specs
    """Not resolved: the number of tensor dimensions need not be known here."""
    devices: tuple[str, ...] = ()
    """Of a target: where the result of each rank of the mesh is to be, in the order of its ranks."""

    @property
    def cuts(self) -> bool:
        """Some mesh dimension shards the tensor."""
        return any(spec.kind == "Shard" for spec in self.specs)

    def cell(self, coordinate: Coordinate) -> Coordinate:
        """The first of the places whose data equal those at ``coordinate``."""
        return tuple(
            0 if spec.kind == "Replicate" else index for spec, index in zip(self.specs, coordinate, strict=True)
        )

    def shard(self, coordinate: Coordinate) -> Coordinate:
        """The first of the places with the same box: copies of it, and other contributions to it."""
        return tuple(index if spec.kind == "Shard" else 0 for spec, index in zip(self.specs, coordinate, strict=True))

    def has_value(self, coordinate: Coordinate) -> bool:
        """The place is given the value; the others of a Partial the neutral element.

        The mean of equal values is the value, also of integers; so for avg every place is given it.
        """
        return partial_op(self.specs) == "avg" or not any(
            spec.kind == "Partial" and index for spec, index in zip(self.specs, coordinate, strict=True)
        )

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.specs))}] on the {self.mesh}"


class Plan:
    """One conversion, before any shape is known."""

    def __init__(self, source: Side, target: Side) -> None:
        self.source = source
        self.target = target
        self.cells: dict[int, Coordinate] = {}
        """The cell of each rank of the source."""
        self.holders: dict[Coordinate, list[int]] = {}
        """The ranks of each cell, in mesh order."""
        for rank, place in zip(source.mesh.ranks, source.mesh.coordinates(), strict=True):
            self.cells[rank] = cell = source.cell(place)
            self.holders.setdefault(cell, []).append(rank)

        self.places = dict(zip(target.mesh.ranks, target.mesh.coordinates(), strict=True))
        """Where each rank of the target is in its mesh."""
        self.devices = dict(zip(target.mesh.ranks, target.devices, strict=True))
        self.readers = [rank for rank, place in self.places.items() if target.has_value(place)]
        """The ranks that are given values."""
        # A rank that takes part anyway provides rather than one that need not.
        self.providers = {
            cell: next((rank for rank in holders if rank in self.readers), holders[0])
            for cell, holders in self.holders.items()
        }

    def served(self, rank: int) -> list[int]:
        """The readers that may need data of ``rank``."""
        cell = self.cells.get(rank)
        if cell is None or self.providers[cell] != rank:
            return []

        return [reader for reader in self.readers if reader not in self.holders[cell]]

    def moved_to(self, device_type: str, reader: int) -> str:
        """Where a sender on ``device_type`` moves what ``reader`` reads, so that it crosses once for all readers there.

        Empty where it stays.
        """
        device = self.devices[reader]
        return "" if device.startswith(device_type) else device

    def needs_shapes(self, rank: int) -> bool:
        """The rank has to know where the pieces lie in the whole, which follows from the shapes of all of them.

        Who only sends to an uncut target need not: its whole piece goes to every reader.
        """
        return rank in self.places or self.target.cuts and bool(self.served(rank))

    def hears(self, rank: int) -> list[int]:
        """The ranks whose hello ``rank`` needs."""
        return sorted(self._hears.get(rank, ()))

    def heard_by(self, rank: int) -> list[int]:
        """The ranks that need the hello of ``rank``."""
        return [other for other, heard in self._hears.items() if rank in heard]

    @cached_property
    def _hears(self) -> dict[int, set[int]]:
        providers = set(self.providers.values())
        hears = {
            rank: {provider for cell, provider in self.providers.items() if rank not in self.holders[cell]}
            if self.needs_shapes(rank)
            else set()
            for rank in {*providers, *self.places}
        }
        # Who holds something may fail on it. Those it hears wait until it has read; so they learn first that it will.
        for rank in providers:
            for other in hears[rank] & providers:
                hears[other].add(rank)

        return hears


@lru_cache(maxsize=512)
def plan_of(source: Side, target: Side) -> Plan:
    """The plan for a pair of layouts; programs convert many tensors alike."""
    return Plan(source, target)
