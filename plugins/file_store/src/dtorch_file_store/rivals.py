"""Two ranks have set one key at the same moment: a mistake of the program's that no node could see in time.

Both have told everybody. Every node decides alike: the lower rank's counts. The other one's producer is told as it
waits. A rank may have got that one before it could know better; it keeps what it reads, and counts as having had its
share of the one that counts, whose producer is told as its wait ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dtorch_core.presence import Failure, settle
from dtorch_file_store.node import Node
from dtorch_file_store.publications import Name, Publication, Table
from dtorch_file_store.refusals import Refusals
from dtorch_file_store.shares import Shares
from dtorch_file_store.values import Value
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame


class Rivals:
    """All of it under the node's mutex. What returns waiters has settled them."""

    def __init__(
        self,
        node: Node,
        table: Table,
        refusals: Refusals,
        shares: Shares,
        free: Callable[[Publication], Iterable[Waiter]],
    ) -> None:
        """
        :param free: what is to be done when this node hears that one of the others' is live no more.
        """
        self._node, self._table, self._refusals, self._shares, self._free = node, table, refusals, shares, free
        self._untold: dict[tuple[int, str], Failure] = {}
        """What a rank (and key) whose publication does not count is told when it waits."""
        self._kept: list[Value | None] = []
        """What those had set. A rank that has a share of it may still read it, and nobody says when it has finished: it
        is kept until a reset, which no borrow outlives, or the end."""
        self._early: dict[Name, Sequence[int]] = {}
        """This node's ranks that won't come for what has yet to arrive."""
        self.handlers = {"void": self._on_void, "misled": self._on_misled}

    def overrule(self, own: Publication, by: Name) -> list[Waiter]:
        """What a rank of this node has set does not count, since a lower rank has set the key too."""
        self._node.tell_all(frame("void", self._table.epoch, *own.name, *by))
        misled = self._misled(own, None)
        own.void = failure = self._refusals.overruled(own, by[0])
        woken = settle(own.waiters, lambda _: failure)
        if not woken:
            self._untold[own.owner, own.key] = failure

        self._table.abandon(own)
        self._kept.append(own.value)
        own.value = None
        self._table.forget(own)
        return woken + self._miss(by, misled, own.owner)

    def told(self, rank: int, key: str) -> Failure | None:
        """Why the wait of a rank for what it has set is none any more; said once."""
        return self._untold.pop((rank, key), None)

    def forget(self, rank: int, key: str) -> None:
        """The rank sets the key anew."""
        if self._untold:
            self._untold.pop((rank, key), None)

    def drop(self) -> list[Value | None]:
        """Forget all; what is returned is to be let go outside the mutex."""
        self._untold.clear()
        self._early.clear()
        kept, self._kept = self._kept, []
        return kept

    def arrived(self, publication: Publication) -> None:
        """One of the others' has come: it counts, maybe, and was missed before."""
        if self._early:
            self._count_out(publication, self._early.pop(publication.name, ()))

    def _misled(self, publication: Publication, counts: Publication | None) -> list[int]:
        """The ranks of this node that have got what does not count, and not what counts."""
        got = set() if counts is None else counts.takers - counts.granted
        return sorted((publication.takers & self._table.own_ranks) - publication.granted - got)

    def _miss(self, name: Name, ranks: Sequence[int], loser: int) -> list[Waiter]:
        """These ranks of this node won't come for what counts: its producer's node is told."""
        if not ranks:
            return []

        home = self._node.homes[name[0]]
        if home == self._node.index:
            return self._missed(name, ranks, loser)

        self._node.tell(home, frame("misled", self._table.epoch, *name, ranks, loser))
        counts = self._table.named(*name)
        if counts is not None:
            self._count_out(counts, ranks)
        elif not self._table.is_told(*name):
            self._early[name] = ranks

        return []

    def _count_out(self, publication: Publication, ranks: Sequence[int]) -> None:
        """They take no share: it may be let go without them."""
        publication.granted.difference_update(ranks)
        publication.takers.update(ranks)
        publication.finished.update(ranks)

    def _missed(self, name: Name, ranks: Sequence[int], loser: int) -> list[Waiter]:
        own = self._table.named(*name)
        if own is None or len(own.finished) == own.get_count:
            return []

        own.missed = self._refusals.missed(own, loser, ranks)
        self._count_out(own, ranks)
        return self._shares.given_back(own, None)

    def _on_void(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, by, by_number = message.fields
        counts = by, by_number
        publication = self._table.named(owner, number)
        if publication is None:
            return ()

        misled = self._misled(publication, self._table.named(*counts))
        woken = list(self._free(publication))
        return woken + self._miss(counts, misled, owner)

    def _on_misled(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, ranks, loser = message.fields
        return self._missed((owner, number), ranks, loser)
