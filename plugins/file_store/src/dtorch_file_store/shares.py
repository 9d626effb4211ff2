"""Who gets a share of a publication, and the ranks that wait for one.

Where there are shares enough for every other rank, each takes its own without asking anybody; the arbiter hears of it
when it finishes. Where there are fewer, a rank claims one and the arbiter grants it. A producer that wants a share of
what would be just enough for the others makes it contested first: every node says who has taken one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from dtorch_core.presence import settle
from dtorch_file_store.node import Node
from dtorch_file_store.publications import Publication, Table
from dtorch_file_store.refusals import Refusals
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame


class Shares:
    """All of it under the node's mutex. What returns waiters has settled them."""

    def __init__(self, node: Node, table: Table, refusals: Refusals) -> None:
        self._node = node
        self._table = table
        self._refusals = refusals
        self._getters: dict[str, list[Waiter]] = {}
        self.handlers = {
            "claim": self._on_claim,
            "finish": self._on_finish,
            "grant": self._on_grant,
            "contest": self._on_contest,
            "taken": self._on_taken,
        }

    # Ranks that wait for a share

    def queue(self, key: str, waiter: Waiter) -> None:
        """A rank waits, and claims what it can't take by itself."""
        self._getters.setdefault(key, []).append(waiter)
        for publication in self._table.of_key(key):
            self._claim(publication, waiter.rank)

    def leave(self, key: str, waiter: Waiter) -> None:
        """It waits no more."""
        getters = self._getters.get(key, [])
        if waiter in getters:
            getters.remove(waiter)
            if not getters:
                del self._getters[key]

    def waiters(self) -> list[Waiter]:
        """Every thread that waits for a share."""
        return [waiter for getters in self._getters.values() for waiter in getters]

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more."""
        return [
            waiter
            for key, getters in self._getters.items()
            for waiter in settle(getters, partial(self._refusals.no_get, key))
        ]

    def give_up_on(self, key: str) -> list[Waiter]:
        """Something of the key is gone: fail the waits that had nothing else to wait for."""
        waiting = self._getters.get(key)
        if not waiting:
            return []

        late = settle(waiting, self._refusals.timed_out(key))
        return late + settle(waiting, partial(self._refusals.no_get, key))

    # Taking one, and giving it back

    def take(self, publication: Publication, rank: int) -> bool:
        """Give a rank of this node its share, if that can be done without asking another node."""
        if publication.value is None:
            return False

        if rank in publication.granted:
            publication.granted.discard(rank)
            publication.handed.discard(rank)
            return True

        if rank in publication.takers:
            return False

        world_size = self._node.presence.world_size
        if rank == publication.owner and not publication.contested and publication.get_count < world_size:
            self._contest(publication)

        if publication.contested and (
            not self._table.decides(publication)
            or publication.awaited
            or len(publication.takers) >= publication.get_count
        ):
            return False

        publication.takers.add(rank)
        return True

    def serve(self, publication: Publication) -> list[Waiter]:
        """Hand shares to the ranks that wait here, or claim some for them."""
        getters = self._getters.get(publication.key)
        if not getters:
            return []

        woken = []
        for waiter in list(getters):
            if waiter.settled:
                continue

            if self.take(publication, waiter.rank):
                woken.append(self._hand(publication, waiter))
            else:
                self._claim(publication, waiter.rank)

        return woken

    def keep(self, publication: Publication, rank: int, *, handed: bool = False) -> None:
        """A share that nobody waits for any more stays the rank's.

        :param handed: its get had it, and was interrupted.
        """
        if publication.value is not None and rank not in publication.finished:
            publication.granted.add(rank)
            if handed:
                publication.handed.add(rank)

    def given_back(self, publication: Publication, mark: Any) -> list[Waiter]:  # noqa: ANN401 - as Value.mark gives it
        """At the arbiter: somebody has finished. The last one lets the tensor go and wakes the producer."""
        if mark is not None:
            publication.marks.append(mark)

        if len(publication.finished) < publication.get_count:
            return []

        publication.awaited.clear()  # all is known
        woken = self._answer_all(publication)
        waiting = [waiter for waiter in publication.waiters if not waiter.settled]
        for waiter in waiting:
            waiter.done = True

        if waiting:
            self._table.free(publication)  # its producer waits already: the thread it wakes has nothing left to do
        elif publication.owner in self._node.presence.closed:
            self._table.abandon(publication)  # it never will
            self._table.free(publication)
        else:
            self._table.let_go(publication)

        return woken + waiting

    def node_gone(self, node: int) -> list[Waiter]:
        """A node has nothing more to say."""
        woken: list[Waiter] = []
        for publication in self._table:
            if node in publication.awaited:
                publication.awaited.discard(node)
                woken += self._answer_all(publication)

        return woken

    def _hand(self, publication: Publication, waiter: Waiter) -> Waiter:
        waiter.done, waiter.result = True, publication
        self.leave(publication.key, waiter)
        return waiter

    def _getter(self, key: str, rank: int) -> Waiter | None:
        return next((w for w in self._getters.get(key, ()) if w.rank == rank and not w.settled), None)

    # Asking the arbiter

    def inherit(self, publication: Publication) -> list[Waiter]:
        """This node is the arbiter now. It knows what the last one knew, who may have had to ask as well."""
        if publication.contested:
            self._contest(publication)

        return self.given_back(publication, None) + self.serve(publication) + self._answer_all(publication)

    def _contest(self, publication: Publication) -> None:
        """Shares have to be granted from now on: who has taken one? So it is where they are just enough for the other
        ranks, and the producer wants one."""
        publication.contested = True
        publication.awaited = {node for node in self._node.links if node not in self._node.gone}
        self._node.tell_all(frame("contest", self._table.epoch, *publication.name))

    def _claim(self, publication: Publication, rank: int) -> None:
        """Ask for a share, for a rank of this node that waits."""
        if publication.value is None or not publication.contested or rank in publication.takers:
            return

        arbiter = self._table.arbiter(publication)
        if arbiter == self._node.index:
            if publication.awaited:
                publication.claims.append((rank, arbiter))
        elif arbiter is not None and rank not in publication.asked | publication.refused:
            publication.asked.add(rank)
            self._table.tell(arbiter, "claim", publication, rank)

    def _on_grant(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, rank, granted = message.fields
        publication = self._table.named(owner, number)
        if publication is None:
            return ()

        key = publication.key
        publication.asked.discard(rank)
        if not granted or rank in publication.finished:  # it was said meanwhile that the rank won't come
            publication.refused.add(rank)
            waiting = [waiter for waiter in self._getters.get(key, ()) if waiter.rank == rank]
            late = settle(waiting, self._refusals.timed_out(key))
            return late + settle(waiting, partial(self._refusals.no_get, key))

        publication.takers.add(rank)
        waiter = self._getter(key, rank)
        if waiter is None:
            self.keep(publication, rank)
            return ()

        return [self._hand(publication, waiter)]

    def _on_contest(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number = message.fields
        publication = self._table.named(owner, number)
        takers: list[int] = []
        if publication is not None:
            publication.contested = True
            takers = sorted(publication.takers & self._table.own_ranks)

        self._node.tell(peer, frame("taken", self._table.epoch, owner, number, takers))
        return ()

    # Being the arbiter

    def _on_claim(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, rank = message.fields
        publication = self._table.named(owner, number)
        if publication is None:  # who asks has yet to hear that it is free: that may be told late, but not now
            self._node.tell(peer, frame("free", self._table.epoch, owner, number))
            return ()

        return self._answer(publication, rank, peer)

    def _on_finish(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, rank, mark = message.fields
        publication = self._table.named(owner, number)
        if publication is None:
            return ()

        publication.takers.add(rank)
        publication.finished.add(rank)
        return self.given_back(publication, None if mark is None else (peer, mark))

    def _on_taken(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, takers = message.fields
        publication = self._table.named(owner, number)
        if publication is None:
            return ()

        publication.takers.update(takers)
        publication.awaited.discard(peer)
        return self._answer_all(publication)

    def _answer(self, publication: Publication, rank: int, home: int) -> list[Waiter]:
        """Grant or refuse a share that was claimed."""
        if publication.awaited or not self._table.decides(publication):
            # The goodbye of the last arbiter may be on its way still, and with it what that one knew.
            publication.claims.append((rank, home))
            return []

        granted = (
            publication.value is not None
            and rank not in publication.takers
            and len(publication.takers) < publication.get_count
        )
        if home != self._node.index:
            if granted:
                publication.takers.add(rank)

            self._table.tell(home, "grant", publication, rank, granted)
            return []

        waiter = self._getter(publication.key, rank)
        if waiter is None:
            return []

        if not granted:
            return settle([waiter], partial(self._refusals.no_get, publication.key))

        publication.takers.add(rank)
        return [self._hand(publication, waiter)]

    def _answer_all(self, publication: Publication) -> list[Waiter]:
        if publication.awaited:
            return []

        claims, publication.claims = publication.claims, []
        return [waiter for rank, home in claims for waiter in self._answer(publication, rank, home)]
