"""The four steps between processes: set a key, get a share, finish, wait until all have finished.

Each node tells the others what its own ranks do, small values and all: one message makes a key known everywhere, and
one ends a borrow. A key is free when its producer has waited. The others hear that with whatever is told to them next;
a rank that finds a key in use asks the arbiter before it says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from dtorch_core._text import seconds
from dtorch_core.errors import KeyInUseError, StoreTimeoutError
from dtorch_core.presence import raise_if, settle
from dtorch_file_store.heirs import Heirs
from dtorch_file_store.node import Handler, Node
from dtorch_file_store.publications import Name, Publication, Table
from dtorch_file_store.questions import Questions
from dtorch_file_store.refusals import Late, Refusals
from dtorch_file_store.rivals import Rivals
from dtorch_file_store.shares import Shares
from dtorch_file_store.values import Value
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame

ANSWER = 1.0
"""Seconds that a wait whose time is over gives to a share that it has claimed already."""


class Keys:
    """The keys of one opening. The four steps take the mutex, except where they say otherwise."""

    def __init__(
        self, node: Node, arrived: Callable[[int, Any, bytes], Value], resetting: Callable[[], Collection[int]]
    ) -> None:
        """
        :param arrived: the value that a node describes.
        :param resetting: the ranks that are in reset().
        """
        self._node = node
        self._presence = node.presence
        self._arrived = arrived
        self._table = Table(node)
        self._refusals = Refusals(node.presence, self._table, resetting)
        self._shares = Shares(node, self._table, self._refusals)
        self._questions = Questions(node, self._table, self._shares)
        self._rivals = Rivals(node, self._table, self._refusals, self._shares, self._free)
        self.heirs = Heirs(node, self._table, self._shares)
        self._numbers = dict.fromkeys(node.own_ranks, 0)
        self._orphans: set[tuple[int, str]] = set()
        """Borrows (rank, key) that reset() has ended."""
        self._early: list[tuple[int, Message]] = []
        self._ahead: dict[Name, list[tuple[int, Message]]] = {}
        """What others say about a publication of which its producer's node has not told this one yet."""
        handlers: Mapping[str, Handler] = {
            "free": self._on_free,
            **self._questions.handlers,
            **self._shares.handlers,
            **self._rivals.handlers,
        }
        for kind, handler in handlers.items():
            node.handlers[kind] = partial(self._handle, handler)

        node.handlers["set"] = self._on_set

    # The four steps

    def put(self, owner: int, key: str, get_count: int, value: Value, timeout: float) -> None:
        """Set a key: tell everybody, and hand shares to the ranks that wait here.

        :param timeout: for the answer of another rank that seems to have the key.
        :raises BaseException: Ctrl-C, also when the key is set already: see :meth:`holds`.
        """
        node, table, adds = self._node, self._table, False
        woken: list[Waiter] = []
        if node.links:  # a lower rank's older set, of a key that was freed since, would seem to come at the same time
            node.look()

        try:
            while True:
                with node.mutex:
                    self._presence.check_open(owner)
                    live = table.in_use(key)
                    if live is None:
                        self._rivals.forget(owner, key)
                        self._numbers[owner] = number = self._numbers[owner] + 1
                        publication = self._publication((owner, number), key, get_count, value)
                        publication.outlet = value if value.settles else None
                        what, adds = value.describe() if node.links else None, True
                        table.told(owner, number)
                        table.add(publication)
                        if node.links:
                            said = table.epoch, owner, number, key, get_count, what, table.freed()
                            node.tell_all(frame("set", *said, body=value.body))

                        adds = False
                        woken = self._shares.serve(publication)
                        break

                    if table.decides(live):
                        raise KeyInUseError(self._refusals.in_use(owner, live))

                    question = self._questions.ask(live, owner)

                # Its producer may have waited, and the news be on its way.
                node.after()
                if not node.wait(question, time.monotonic() + timeout):
                    late = f" (no answer from it in {seconds(timeout)})"
                    raise KeyInUseError(self._refusals.in_use(owner, live) + late)

                raise_if(question.error)
                if question.result:
                    raise KeyInUseError(self._refusals.in_use(owner, live))

            node.after(woken)
        except BaseException:  # Ctrl-C: the key is set or it is not, unless that was half done
            if adds:
                with node.mutex:
                    woken = list(node.on_torn(f"it set {key!r}"))

            node.after(woken)
            raise

    def holds(self, value: Value) -> bool:
        """Somebody may still read it."""
        with self._node.mutex:
            return any(found.value is value for found in self._table)

    def get(self, rank: int, key: str, timeout: float) -> Publication:
        """Take a share of the key's next generation, waiting for it."""
        node, shares, deadline = self._node, self._shares, time.monotonic() + timeout
        waiter = Waiter(rank)
        try:
            with node.mutex:
                self._presence.check_open(rank)
                for publication in self._table.of_key(key):
                    if shares.take(publication, rank):
                        waiter.result = publication
                        waiter.done = True
                        return publication

                raise_if(self._refusals.no_get(key, waiter))
                shares.queue(key, waiter)

            node.after()
            node.look_first(lambda: waiter.settled, timeout)
            if not (waiter.done or node.wait(waiter, deadline)) and self._is_late(rank, key, waiter, timeout):
                node.wait(waiter, time.monotonic() + ANSWER)
        except BaseException:  # Ctrl-C: a share that was just handed over is the rank's next time
            with node.mutex:
                if waiter.done:
                    shares.keep(waiter.result, rank, handed=True)
                else:
                    shares.leave(key, waiter)

            raise

        if not waiter.done:
            with node.mutex:
                if not waiter.done:
                    shares.leave(key, waiter)
                    raise_if(waiter.error)
                    raise StoreTimeoutError(self._refusals.late_get(rank, key, timeout))

        taken: Publication = waiter.result
        return taken

    def keep(self, rank: int, publication: Publication) -> None:
        """The share that a rank has taken is still its own: the next get has it, and a finish gives it up."""
        with self._node.mutex:
            self._shares.keep(publication, rank, handed=True)

    def borrowed(self, rank: int, key: str) -> Publication | None:
        """What ``rank`` has borrowed under the key. Takes no mutex: nobody else ends this rank's borrows."""
        return self._table.borrowed(rank, key)

    def finish(self, rank: int, key: str, mark: Any = None) -> None:  # noqa: ANN401 - an event, or plain values
        """End a borrow, and tell the producer.

        :param mark: from :meth:`Value.mark`; a list is of plain values, and goes to the producer's process.
        """
        node, ends = self._node, False
        woken: list[Waiter] = []
        try:
            with node.mutex:
                publication = self._table.borrowed(rank, key)
                if publication is None:
                    raise self._bad_finish(rank, key)

                if self._orphans:
                    self._orphans.discard((rank, key))

                ends = True
                publication.granted.discard(rank)
                publication.finished.add(rank)
                arbiter = self._table.arbiter(publication)
                if arbiter == node.index:
                    woken = self._shares.given_back(publication, mark)
                elif arbiter is not None:
                    self._table.tell(arbiter, "finish", publication, rank, mark if isinstance(mark, list) else None)

                ends = False

            node.after(woken)
        except BaseException:  # Ctrl-C: it has finished or it has not, unless that was half done
            if ends:
                with node.mutex:
                    woken = list(node.on_torn(f"it finished {key!r}"))

            node.after(woken)
            raise

    def wait(self, rank: int, key: str, timeout: float) -> Publication:
        """Wait until all have finished, then free the key: what it held, and the marks of its consumers."""
        node, deadline = self._node, time.monotonic() + timeout
        waiter = publication = None
        try:
            with node.mutex:
                self._presence.check_open(rank)
                publication = next((found for found in self._table.of_key(key) if found.owner == rank), None)
                if publication is None:
                    raise_if(self._rivals.told(rank, key))
                    raise self._refusals.bad_wait(rank, key)

                if len(publication.finished) == publication.get_count:
                    self._table.free(publication)
                    raise_if(publication.missed)
                    return publication

                waiter = Waiter(rank)
                raise_if(self._refusals.no_finish(publication, waiter))
                publication.waiters.append(waiter)

            node.look_first(lambda: waiter.settled, timeout)
            if not waiter.done:
                node.wait(waiter, deadline)
        except BaseException:  # Ctrl-C: the wait can be repeated
            with node.mutex:
                if publication is not None and waiter is not None:
                    if waiter.done:
                        self._table.add(publication)
                    elif waiter in publication.waiters:
                        publication.waiters.remove(waiter)

            raise

        if not waiter.done:  # otherwise the last to finish has freed the key
            with node.mutex:
                if not waiter.done:
                    publication.waiters.remove(waiter)
                    raise_if(waiter.error)
                    raise StoreTimeoutError(self._refusals.late_finish(rank, publication, timeout))

        raise_if(publication.missed)
        return publication

    def _publication(self, name: Name, key: str, get_count: int, value: Value) -> Publication:
        return Publication(name, key, get_count, value, get_count < self._presence.world_size - 1)

    def _is_late(self, rank: int, key: str, waiter: Waiter, timeout: float) -> bool:
        """Whether a share was claimed, so that an answer is on its way: it is worth a moment more."""
        with self._node.mutex:
            if waiter.settled or not any(rank in found.asked for found in self._table.of_key(key)):
                return False

            waiter.result = Late(timeout)
            return True

    def _bad_finish(self, rank: int, key: str) -> Exception:
        if (rank, key) in self._orphans:
            self._orphans.discard((rank, key))
            return self._refusals.orphaned(rank, key)

        return self._refusals.bad_finish(rank, key)

    # What other nodes say. Under the mutex.

    def _handle(self, handler: Handler, peer: int, message: Message) -> Iterable[Waiter]:
        epoch, owner, number, *_ = message.fields
        if epoch != self._table.epoch:
            return self._of_another_epoch(epoch, peer, message)

        if self._table.is_told(owner, number):
            return handler(peer, message)

        self._ahead.setdefault((owner, number), []).append((peer, message))
        return ()

    def _of_another_epoch(self, epoch: int, peer: int, message: Message) -> Iterable[Waiter]:
        if epoch > self._table.epoch:
            self._early.append((peer, message))  # its node has passed a reset that this one has yet to hear of

        return ()  # of an older one: about keys that are gone. Who asked knows, or will soon

    def _on_set(self, peer: int, message: Message) -> Iterable[Waiter]:
        epoch, owner, number, *_, freed = message.fields
        table = self._table
        if epoch != table.epoch:
            return self._of_another_epoch(epoch, peer, message)

        table.told(owner, number)
        woken = self._set(message)
        if self._ahead:
            for other, ahead in self._ahead.pop((owner, number), ()):
                woken += self._node.handlers[ahead.kind](other, ahead)

        for name in freed:  # now: whoever waits for the key has a share of this one, and need not be asked what else
            publication = table.named(*name)
            woken += () if publication is None else self._free(publication)

        return woken

    def _set(self, message: Message) -> list[Waiter]:
        _, owner, number, key, get_count, described, _ = message.fields
        woken: list[Waiter] = []
        own = self._table.own(key)
        if own is not None and self._table.decides(own):
            if own.owner < owner:
                return []

            woken += self._rivals.overrule(own, (owner, number))

        value = self._arrived(self._node.homes[owner], described, message.body)
        publication = self._publication((owner, number), key, get_count, value)
        self._rivals.arrived(publication)
        self._table.add(publication)
        return woken + self._shares.serve(publication)

    def _on_free(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number = message.fields
        publication = self._table.named(owner, number)
        return () if publication is None else self._free(publication)

    def _free(self, publication: Publication) -> Iterable[Waiter]:
        if publication.readers & self._table.own_ranks:
            publication.refused.update(self._table.own_ranks)  # it does not count, and nobody grants a share of it
        else:
            self._table.forget(publication)

        return self._shares.give_up_on(publication.key) + self._questions.answered(publication.name, live=False)

    def lent(self) -> list[Value]:
        """What this node's ranks have published, and not all have finished. Under the mutex."""
        return [found.value for found in self._table if found.value is not None and found.owner in self._numbers]

    def let_go(self) -> None:
        """This node's ranks have left: what they have published lies in memory that others have mapped themselves. Of
        what lies on a GPU that is said elsewhere."""
        for found in self._table:
            if found.owner in self._numbers and found.value is not None and not found.value.marks:
                self._table.let_go(found)

    # Ends. Under the mutex; they return the waiters that they settle.

    def drop(self) -> list[object]:
        """Forget every key, of all ranks. What is returned holds tensors, to be let go outside the mutex."""
        self._ahead.clear()
        dropped = self._table.drop()
        own = self._table.own_ranks
        self._orphans.update((rank, found.key) for found in dropped for rank in found.borrowers & own)
        return [*dropped, *self._rivals.drop()]

    def after_drop(self) -> list[Waiter]:
        """Messages of the new epoch that came early."""
        early, self._early = self._early, []
        return [waiter for peer, message in early for waiter in self._node.handlers[message.kind](peer, message)]

    def node_gone(self, node: int) -> list[Waiter]:
        """A node has nothing more to say: who has asked it asks its heir."""
        asking = self._questions.node_gone()
        return self._shares.node_gone(node) + asking

    def waiters(self) -> list[Waiter]:
        """Every thread that waits for a key."""
        asking = self._questions.waiters()
        return self._shares.waiters() + asking + [waiter for found in self._table for waiter in found.waiters]

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more."""
        failed = self._shares.give_up()
        for publication in self._table:
            failed += settle(publication.waiters, partial(self._refusals.no_finish, publication))

        return failed + self._questions.give_up()
