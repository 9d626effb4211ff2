"""What becomes of the keys, and of the borrows, of ranks that have said goodbye."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dtorch_file_store.node import Node
from dtorch_file_store.publications import Name, Publication, Table
from dtorch_file_store.shares import Shares
from dtorch_file_store.waiting import Waiter

Part = tuple[int, int, bool]
"""What a rank has taken: its name, and whether the rank has finished."""

Estate = tuple[int, int, list[int], list[int], bool]
"""What an arbiter knows of a publication: its name, who has taken and finished it, and whether it is contested."""


class Heirs:
    """All of it under the node's mutex."""

    def __init__(self, node: Node, table: Table, shares: Shares) -> None:
        self._node = node
        self._presence = node.presence
        self._table = table
        self._shares = shares

    def parts_of(self, rank: int) -> list[Part]:
        """What a rank that leaves has taken. That it has finished it may have told an arbiter that has left itself."""
        return [(*found.name, rank in found.finished) for found in self._table if rank in found.takers]

    def estate_of(self) -> list[Estate]:
        """What this node knows of what it decides about, for the next arbiter."""
        return [
            (*found.name, sorted(found.takers), sorted(found.finished), found.contested)
            for found in self._table
            if self._table.decides(found) and found.value is not None
        ]

    def rank_left(self, rank: int, parts: Iterable[Part], estate: Iterable[Estate]) -> list[Waiter]:
        """A rank has said goodbye: who waits for what it borrowed learns it, and its keys get another arbiter."""
        # Also what this node has no use for yet. It may be the next arbiter, and hear of an earlier one's goodbye later
        # than of this one's.
        grown = {
            (owner, number)
            for owner, number, finished in parts
            if self._learn((owner, number), [rank], [rank] if finished else [])
        }
        for owner, number, takers, finished, contested in estate:
            self._learn((owner, number), takers, finished, contested)

        woken: list[Waiter] = []
        for publication in self._table:
            if publication.owner not in self._presence.closed:
                continue

            if publication.owner == rank and publication.value is None:
                self._table.abandon(publication)
                self._table.free(publication)  # finished, and nobody will wait for it
                continue

            if self._table.arbiter(publication, leaving=rank) != self._table.arbiter(publication):
                woken += self._inherit(publication)
            elif publication.name in grown and self._table.decides(publication):
                woken += self._shares.given_back(publication, None)

        return woken

    def _learn(self, name: Name, takers: Collection[int], finished: Collection[int], contested: bool = False) -> bool:
        """Whether somebody has finished of whom this node did not know it."""
        publication = self._table.named(*name)
        if publication is None:
            return False

        grows = not publication.finished.issuperset(finished)
        publication.takers.update(takers)
        publication.finished.update(finished)
        publication.contested = publication.contested or contested
        return grows

    def _inherit(self, publication: Publication) -> list[Waiter]:
        """Its producer, or the arbiter after that, has left."""
        arbiter = self._table.arbiter(publication)
        publication.asked.clear()
        if arbiter == self._node.index:
            return self._shares.inherit(publication)

        if arbiter is not None:
            # What this node's ranks told the old arbiter may have come too late.
            for one in publication.finished & self._table.own_ranks:
                self._table.tell(arbiter, "finish", publication, one, None)

        return self._shares.serve(publication)
