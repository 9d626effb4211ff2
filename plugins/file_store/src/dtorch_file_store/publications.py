"""What is published: one record for each generation of each key, and this node's table of them.

A publication belongs to its producer's node, which tells it to all others at once. What has to be decided about it its
*arbiter* decides: that node, or, once the producer has left, the node of the first rank that is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from dtorch_core.presence import Failure
from dtorch_file_store.node import Node
from dtorch_file_store.values import Value
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import frame

Name = tuple[int, int]
"""The producer's rank, and which of its publications it is."""


class Publication:
    """One generation of one key, as this node knows it."""

    __slots__ = (
        "asked",
        "awaited",
        "claims",
        "contested",
        "finished",
        "get_count",
        "granted",
        "handed",
        "key",
        "marks",
        "missed",
        "name",
        "outlet",
        "owner",
        "refused",
        "takers",
        "value",
        "void",
        "waiters",
    )

    def __init__(self, name: Name, key: str, get_count: int, value: Value, contested: bool) -> None:
        self.name = name
        """Tells it apart from every other one."""
        self.owner = name[0]
        self.key = key
        self.get_count = get_count
        self.value: Value | None = value
        """None once all have finished."""
        self.outlet: Value | None = None
        """The same, if its producer's wait has something to do with it."""
        self.contested = contested
        """A share has to be granted."""
        self.takers: set[int] = set()
        """Ranks that have a share: all of them at the arbiter; elsewhere this node's, and others that it knows of."""
        self.finished: set[int] = set()
        """The same for those that have given it back."""
        self.marks: list[Any] = []
        """What consumers on other streams or in other processes said with their finish, for the producer's stream."""
        self.claims: list[tuple[int, int]] = []
        """At the arbiter: who asks for a share (rank, node) and has to wait for an answer."""
        self.awaited: set[int] = set()
        """At the arbiter: nodes that have not yet said who has taken a share."""
        self.asked: set[int] = set()
        """Elsewhere: this node's ranks that have claimed a share and have no answer yet."""
        self.refused: set[int] = set()
        """Elsewhere: this node's ranks that were refused one."""
        self.granted: set[int] = set()
        """This node's ranks that have a share and have not got it: their next get does."""
        self.handed: set[int] = set()
        """Those of them whose get was interrupted as it had it, so that a finish gives it up, too."""
        self.waiters: list[Waiter] = []
        """The producer's threads that wait for the end."""
        self.void: Failure | None = None
        """Another rank has set the key at the same time, and that one counts."""
        self.missed: Failure | None = None
        """This one counts, and somebody has got the other one."""

    @property
    def borrowers(self) -> set[int]:
        """The ranks that have taken a share and not finished."""
        return self.takers - self.finished

    @property
    def readers(self) -> set[int]:
        """Of this node's: those that have got it."""
        return self.borrowers - self.granted


class Table:
    """The publications that this node knows. All of it under the node's mutex."""

    def __init__(self, node: Node) -> None:
        self.epoch = 0
        """How often all keys were dropped. Messages of another epoch are about keys of another one."""
        self.own_ranks = frozenset(node.own_ranks)
        self._node = node
        self._live: dict[str, list[Publication]] = {}
        self._names: dict[Name, Publication] = {}
        self._newest: dict[int, int] = {}
        self._freed: list[Name] = []
        """Of this node's ranks: what the others have yet to hear of."""

    def __iter__(self) -> Iterator[Publication]:
        return iter(list(self._names.values()))

    def of_key(self, key: str) -> list[Publication]:
        """Those of one key, the oldest first: that it is free again is heard later than that it was set anew."""
        return self._live.get(key, [])

    def named(self, owner: int, number: int) -> Publication | None:
        """The one of this name, while it is here."""
        return self._names.get((owner, number))

    def in_use(self, key: str) -> Publication | None:
        """What the key holds, as far as this node knows."""
        live = self._live.get(key)
        return live[0] if live else None

    def own(self, key: str) -> Publication | None:
        """What a rank of this node has set there."""
        for publication in self._live.get(key, ()):
            if publication.owner in self.own_ranks:
                return publication

        return None

    def borrowed(self, rank: int, key: str) -> Publication | None:
        """What ``rank`` has borrowed under the key: got and not finished. Else, what it would have got."""
        handed = None
        for publication in tuple(self._live.get(key, ())):  # another thread may take an older one away
            if rank in publication.takers and rank not in publication.finished:
                if rank not in publication.granted:
                    return publication

                if rank in publication.handed:
                    handed = handed or publication

        return handed

    def is_told(self, owner: int, number: int) -> bool:
        """Its producer's node has told it to this one; it need not be here any more."""
        return number <= self._newest.get(owner, 0)

    def told(self, owner: int, number: int) -> None:
        """From now on that is so. Producers number what they set."""
        self._newest[owner] = number

    def add(self, publication: Publication) -> None:
        """It is live."""
        self._live.setdefault(publication.key, []).append(publication)
        self._names[publication.name] = publication

    def free(self, publication: Publication) -> None:
        """The key is free; the others hear it with what is told to them next."""
        self.forget(publication)
        if publication.owner not in self.own_ranks:
            self._tell_free(publication.name)
        elif self._node.links:
            self._freed.append(publication.name)
            self._node.owes = self._tell_freed

    def freed(self) -> list[Name]:
        """What this node's ranks have freed and nobody was told yet: whoever asks tells it."""
        freed, self._freed, self._node.owes = self._freed, [], None
        return freed

    def _tell_freed(self) -> None:
        for name in self.freed():
            self._tell_free(name)

    def _tell_free(self, name: Name) -> None:
        self._node.tell_all(frame("free", self.epoch, *name), lazily=True)

    def forget(self, publication: Publication) -> None:
        """It is live no more, and its tensor is let go."""
        if self._names.pop(publication.name, None) is None:
            return

        live = self._live[publication.key]
        live.remove(publication)
        if not live:
            del self._live[publication.key]

        self.let_go(publication)

    def let_go(self, publication: Publication) -> None:
        """Nobody reads it any more."""
        value = publication.value
        if value is not None:
            publication.value = None
            value.finished()
            self._node.trash.append(value)  # tensors are not freed under the mutex

    def abandon(self, publication: Publication) -> None:
        """Its producer will not wait for it."""
        outlet, publication.outlet = publication.outlet, None
        if outlet is not None:
            self._node.jobs.append(partial(outlet.abandon, publication.marks))

    def drop(self) -> list[Publication]:
        """Forget all, and begin a new epoch. What is returned holds tensors, to be let go outside the mutex."""
        dropped = list(self)
        for publication in dropped:
            self.abandon(publication)

        self._live.clear()
        self._names.clear()
        self.freed()  # every node forgets all
        self.epoch += 1
        return dropped

    def arbiter(self, publication: Publication, leaving: int | None = None) -> int | None:
        """The node that decides about it; None if every rank has left.

        :param leaving: this rank counts as being here.
        """
        rank = self.decider(publication, leaving)
        return None if rank is None else self._node.homes[rank]

    def decider(self, publication: Publication, leaving: int | None = None) -> int | None:
        """The rank at whose node that is: its producer, or else the first one that is here."""
        closed = self._node.presence.closed
        if publication.owner not in closed or publication.owner == leaving:
            return publication.owner

        return next((rank for rank in range(len(self._node.homes)) if rank not in closed or rank == leaving), None)

    def decides(self, publication: Publication) -> bool:
        """Whether this node is the arbiter."""
        return self.arbiter(publication) == self._node.index

    def tell(self, node: int, kind: str, publication: Publication, *more: object) -> None:
        """Say something about a publication to another node."""
        self._node.tell(node, frame(kind, self.epoch, *publication.name, *more))
