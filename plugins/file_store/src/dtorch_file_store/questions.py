"""Whether a key that is in use is live: a rank that wants to set it asks the arbiter. Its producer may have waited, and
that is told to the others only with whatever comes next.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtorch_core.presence import raise_if, settle
from dtorch_file_store.node import Node
from dtorch_file_store.publications import Name, Publication, Table
from dtorch_file_store.shares import Shares
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame


class Questions:
    """All of it under the node's mutex. What returns waiters has settled them, except where it says otherwise."""

    def __init__(self, node: Node, table: Table, shares: Shares) -> None:
        self._node, self._presence, self._table, self._shares = node, node.presence, table, shares
        self._questions: dict[Name, list[Waiter]] = {}
        """Who has asked whether a publication is live."""
        self.handlers = {"live?": self._on_live_asked, "live": self._on_live}

    def ask(self, publication: Publication, rank: int) -> Waiter:
        """Ask the arbiter whether a publication is live."""
        raise_if(self._presence.over(rank, f"src_set({publication.key!r})"))
        waiter = Waiter(rank)
        self._questions.setdefault(publication.name, []).append(waiter)
        arbiter = self._table.arbiter(publication)
        assert arbiter is not None, "this rank is here"
        self._table.tell(arbiter, "live?", publication)
        return waiter

    def answered(self, name: Name, live: bool) -> list[Waiter]:
        """Who asked for it goes on: with that, or to look anew."""
        waiters = [waiter for waiter in self._questions.pop(name, ()) if not waiter.settled]
        for waiter in waiters:
            waiter.done, waiter.result = True, live

        return waiters

    def node_gone(self) -> list[Waiter]:
        """A node has nothing more to say: who has asked it asks its heir."""
        return [waiter for name in list(self._questions) for waiter in self.answered(name, live=False)]

    def waiters(self) -> list[Waiter]:
        """Every thread that waits for an answer; not settled."""
        return [waiter for waiters in self._questions.values() for waiter in waiters]

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more."""
        failed: list[Waiter] = []
        for waiters in self._questions.values():
            failed += settle(waiters, lambda waiter: self._presence.over(waiter.rank, "src_set"))

        return failed

    # What other nodes say

    def _on_live_asked(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number = message.fields
        live = self._table.named(owner, number) is not None
        self._node.tell(peer, frame("live", self._table.epoch, owner, number, live))
        return ()

    def _on_live(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, live = message.fields
        publication = None if live else self._table.named(owner, number)
        failed: list[Waiter] = []
        if publication is not None:
            self._table.forget(publication)
            failed = self._shares.give_up_on(publication.key)

        return failed + self.answered((owner, number), live)
