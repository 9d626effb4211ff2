"""What becomes of the keys, and of the borrows, of ranks that have said goodbye."""

from __future__ import annotations

from collections.abc import Iterable

from dtorch_file_store.node import Node
from dtorch_file_store.publications import Name, Publication, Table
from dtorch_file_store.shares import Shares
from dtorch_file_store.waiting import Waiter

Estate = tuple[int, int, list[int], list[int], bool]
"""What an arbiter knows of a publication: its name, who has taken and finished it, and whether it is contested."""


class Heirs:
    """All of it under the node's mutex."""

    def __init__(self, node: Node, table: Table, shares: Shares) -> None:
        self._node = node
        self._presence = node.presence
        self._table = table
        self._shares = shares

    def borrows_of(self, rank: int) -> list[Name]:
        """What a rank that leaves has taken and not finished."""
        return [found.name for found in self._table if rank in found.borrowers]

    def estate_of(self) -> list[Estate]:
        """What this node knows of what it decides about, for the next arbiter."""
        return [
            (*found.name, sorted(found.takers), sorted(found.finished), found.contested)
            for found in self._table
            if self._table.decides(found) and found.value is not None
        ]

    def rank_left(self, rank: int, borrows: Iterable[Name], estate: Iterable[Estate]) -> list[Waiter]:
        """A rank has said goodbye: who waits for what it borrowed learns it, and its keys get another arbiter."""
        for name in borrows:
            borrowed = self._table.named(*name)
            if borrowed is not None:
                borrowed.takers.add(rank)

        woken: list[Waiter] = []
        known = {(owner, number): (takers, finished, contest) for owner, number, takers, finished, contest in estate}
        for publication in self._table:
            if publication.owner not in self._presence.closed:
                continue

            if publication.owner == rank and publication.value is None:
                self._table.abandon(publication)
                self._table.free(publication)  # finished, and nobody will wait for it
                continue

            if self._table.arbiter(publication, leaving=rank) == self._table.arbiter(publication):
                continue

            woken += self._inherit(publication, *known.get(publication.name, ((), (), False)))

        return woken

    def _inherit(
        self, publication: Publication, takers: Iterable[int], finished: Iterable[int], contested: bool
    ) -> list[Waiter]:
        """Its producer, or the arbiter after that, has left; that one knew the rest."""
        arbiter = self._table.arbiter(publication)
        publication.asked.clear()
        if arbiter == self._node.index:
            publication.takers.update(takers)
            publication.finished.update(finished)
            publication.contested = publication.contested or contested
            return self._shares.inherit(publication)

        if arbiter is not None:
            # What this node's ranks told the old arbiter may have come too late.
            for one in publication.finished & self._table.own_ranks:
                self._table.tell(arbiter, "finish", publication, one, None)

        return self._shares.serve(publication)
