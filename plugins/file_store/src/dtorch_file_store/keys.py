"""The four steps between processes: who has published what, who takes it, and when a key is free again.

A publication belongs to its producer's node, which tells it to all others at once, small values and all. What has to
be decided, its *arbiter* decides: that node, or, once the producer has left, the node of the first rank that is here.

Where there are shares enough for every other rank, each takes its own without asking anybody; the arbiter hears of it
when it finishes. Where there are fewer, a rank claims one and the arbiter grants it. A producer that wants a share of
what would be just enough for the others makes it contested first: every node says who has taken one.

A key is free when its producer has waited. The others hear that with whatever is told to them next; a rank that finds
a key in use asks the arbiter before it says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from dtorch_core._text import count, rank_list, seconds
from dtorch_core.errors import AbortedError, KeyInUseError, ProtocolError, StoreTimeoutError
from dtorch_file_store.node import Node
from dtorch_file_store.values import Value
from dtorch_file_store.waiting import Failure, Waiter, raise_if, settle
from dtorch_file_store.wire import Message, frame


ANSWER = 1.0
"""Seconds that a wait whose time is over gives to a share that it has claimed already."""


class _Late(float):
    """The result of a wait whose time (in seconds) is over: it only waits for that answer."""


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
        "key",
        "marks",
        "number",
        "outlet",
        "owner",
        "refused",
        "takers",
        "value",
        "void",
        "waiters",
    )

    def __init__(self, owner: int, number: int, key: str, get_count: int, value: Value, contested: bool) -> None:
        self.owner = owner
        self.number = number
        """Which of its owner's publications it is."""
        self.key = key
        self.get_count = get_count
        self.value: Value | None = value
        """None once all have finished."""
        self.outlet: Value | None = None
        """The same, if its producer's wait has something to do with it."""
        self.contested = contested
        """A share has to be granted."""
        self.takers: set[int] = set()
        """Ranks that have a share: all of them at the arbiter, this node's elsewhere."""
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
        """This node's ranks that have got a share when nobody waited for it any more: their next get takes it."""
        self.waiters: list[Waiter] = []
        """The producer's threads that wait for the end."""
        self.void: Failure | None = None
        """Another rank has set the key at the same time."""

    @property
    def borrowers(self) -> set[int]:
        """The ranks that have taken a share and not finished."""
        return self.takers - self.finished

    @property
    def name(self) -> tuple[int, int]:
        """Tells it apart from every other one."""
        return self.owner, self.number


class Keys:
    """The keys of one opening. Its public methods take the mutex, except where they say otherwise."""

    def __init__(self, node: Node, arrived: Callable[[int, Any, bytes], Value]) -> None:
        """
        :param arrived: the value that a node describes.
        """
        self._node = node
        self._presence = node.presence
        self._arrived = arrived
        self.resetting: Callable[[], Collection[int]] = tuple
        """The ranks that are in reset()."""
        self.epoch = 0
        """How often all keys were dropped. Messages of another epoch are about keys of another one."""
        self._numbers = dict.fromkeys(node.own_ranks, 0)
        self._live: dict[str, list[Publication]] = {}
        self._names: dict[tuple[int, int], Publication] = {}
        self._getters: dict[str, list[Waiter]] = {}
        self._orphans: set[tuple[int, str]] = set()
        self._questions: dict[tuple[int, int], list[Waiter]] = {}
        self._early: list[tuple[int, Message]] = []
        for kind in ("set", "claim", "grant", "finish", "free", "contest", "taken", "live?", "live"):
            node.handlers[kind] = partial(self._handle, getattr(self, "_on_" + kind.replace("?", "_asked")))

    # The four steps

    def put(self, owner: int, key: str, get_count: int, value: Value, timeout: float) -> None:
        """Set a key: tell everybody, and hand shares to the ranks that wait here.

        :param timeout: for the answer of another rank that seems to have the key.
        """
        node = self._node
        while True:
            with node.mutex:
                self._presence.check_open(owner)
                live = self._in_use(key)
                if live is None:
                    contested = get_count < self._presence.world_size - 1
                    self._numbers[owner] = number = self._numbers[owner] + 1
                    publication = Publication(owner, number, key, get_count, value, contested)
                    publication.outlet = value if value.settles else None
                    self._add(publication)
                    node.tell_all(
                        frame(
                            "set", self.epoch, owner, number, key, get_count, value.describe(), body=value.body
                        )
                    )
                    woken = self._serve(publication)
                    break

                if self._arbiter(live) == node.index:
                    raise KeyInUseError(self._in_use_text(owner, live))

                question = self._ask(live, owner)

            # Its producer may have waited, and the news be on its way.
            node.after()
            if not node.wait(question, time.monotonic() + timeout):
                raise KeyInUseError(self._in_use_text(owner, live) + f" (no answer from it in {seconds(timeout)})")

            raise_if(question.error)
            if question.result:
                raise KeyInUseError(self._in_use_text(owner, live))

        node.after(woken)

    def get(self, rank: int, key: str, timeout: float) -> Publication:
        """Take a share of the key's next generation, waiting for it."""
        node, deadline = self._node, time.monotonic() + timeout
        with node.mutex:
            self._presence.check_open(rank)
            for publication in self._live.get(key, ()):
                if self._take(publication, rank):
                    return publication

            waiter = Waiter(rank)
            raise_if(self._why_no_get(key, waiter))
            self._getters.setdefault(key, []).append(waiter)
            for publication in self._live.get(key, ()):
                self._claim(publication, rank)

        node.after()
        try:
            if not node.wait(waiter, deadline) and self._is_late(rank, key, waiter, timeout):
                node.wait(waiter, time.monotonic() + ANSWER)
        except BaseException:  # Ctrl-C: a share that was just handed over is the rank's next time
            with node.mutex:
                if waiter.done:
                    self._keep(waiter.result, rank)
                else:
                    self._drop_getter(key, waiter)

            raise

        if not waiter.done:
            with node.mutex:
                if not waiter.done:
                    self._drop_getter(key, waiter)
                    raise_if(waiter.error)
                    raise StoreTimeoutError(self._late_get(rank, key, timeout))

        publication: Publication = waiter.result
        return publication

    def _is_late(self, rank: int, key: str, waiter: Waiter, timeout: float) -> bool:
        """Whether a share was claimed, so that an answer is on its way: it is worth a moment more."""
        with self._node.mutex:
            if waiter.settled or not any(rank in found.asked for found in self._live.get(key, ())):
                return False

            waiter.result = _Late(timeout)
            return True

    def borrowed(self, rank: int, key: str) -> Publication | None:
        """What ``rank`` has borrowed under the key."""
        for publication in self._live.get(key, ()):
            if rank in publication.borrowers:
                return publication

        return None

    def finish(self, rank: int, key: str, mark: Any = None) -> None:  # noqa: ANN401 - an event, or plain values
        """End a borrow, and tell the producer."""
        with self._node.mutex:
            publication = self.borrowed(rank, key)
            if publication is None:
                raise self._bad_finish(rank, key)

            self._orphans.discard((rank, key))
            publication.finished.add(rank)
            arbiter = self._arbiter(publication)
            if arbiter == self._node.index:
                woken = self._finished(publication, mark)
            else:
                woken = []
                self._node.tell(arbiter, frame("finish", self.epoch, *publication.name, rank, mark if isinstance(mark, list) else None))

        self._node.after(woken)

    def wait(self, rank: int, key: str, timeout: float) -> Publication:
        """Wait until all have finished, then free the key: what it held, and the marks of its consumers."""
        node, deadline = self._node, time.monotonic() + timeout
        with node.mutex:
            self._presence.check_open(rank)
            publication = next((found for found in self._live.get(key, ()) if found.owner == rank), None)
            if publication is None:
                raise self._bad_wait(rank, key)

            if len(publication.finished) == publication.get_count:
                self._free(publication)
                return publication

            waiter = Waiter(rank)
            raise_if(self._why_no_finish(publication, waiter))
            publication.waiters.append(waiter)

        try:
            node.wait(waiter, deadline)
        except BaseException:  # Ctrl-C: the wait can be repeated
            with node.mutex:
                if waiter.done:
                    self._add(publication)
                else:
                    publication.waiters.remove(waiter)

            raise

        if not waiter.done:  # otherwise the last to finish has freed the key
            with node.mutex:
                if not waiter.done:
                    publication.waiters.remove(waiter)
                    raise_if(waiter.error)
                    raise StoreTimeoutError(self._late_finish(rank, publication, timeout))

        return publication

    # Ends. Under the mutex; they return the waiters that they settle.

    def drop(self) -> list[Publication]:
        """Forget every key, of all ranks. What is returned holds tensors, to be let go outside the mutex."""
        dropped = list(self._names.values())
        for publication in dropped:
            self._abandon(publication)

        own = set(self._node.own_ranks)
        self._orphans.update((rank, found.key) for found in dropped for rank in found.borrowers & own)
        self._live.clear()
        self._names.clear()
        self.epoch += 1
        return dropped

    def after_drop(self) -> list[Waiter]:
        """Messages of the new epoch that came early."""
        early, self._early = self._early, []
        return [waiter for peer, message in early for waiter in self._node.handlers[message.kind](peer, message)]

    def borrows_of(self, rank: int) -> list[tuple[int, int]]:
        """What a rank that leaves has taken and not finished."""
        return [found.name for found in self._names.values() if rank in found.borrowers]

    def estate_of(self, rank: int) -> list[tuple[int, int, list[int], list[int], bool]]:
        """What the arbiter of a leaving rank's keys knows about them."""
        return [
            (*found.name, sorted(found.takers), sorted(found.finished), found.contested)
            for found in self._names.values()
            if self._arbiter(found) == self._node.index and found.value is not None
        ]

    def rank_left(
        self, rank: int, borrows: Iterable[tuple[int, int]], estate: Iterable[tuple[int, int, list[int], list[int], bool]]
    ) -> list[Waiter]:
        """A rank has said goodbye: who waits for what it borrowed learns it, and its keys get another arbiter."""
        for name in borrows:
            publication = self._names.get(tuple(name))
            if publication is not None:
                publication.takers.add(rank)

        woken: list[Waiter] = []
        known = {(owner, number): rest for owner, number, *rest in estate}
        for publication in list(self._names.values()):
            if publication.owner not in self._presence.closed:
                continue

            if publication.owner == rank and publication.value is None:
                self._abandon(publication)
                self._free(publication)  # finished, and nobody will wait for it
                continue

            woken += self._inherit(publication, known.get(publication.name))

        return woken

    def _inherit(self, publication: Publication, known: list[Any] | None) -> list[Waiter]:
        """Its producer, or the arbiter after that, has left."""
        node, arbiter = self._node, self._arbiter(publication)
        publication.asked.clear()
        if arbiter == node.index:
            takers, finished, contested = known or ((), (), False)
            publication.takers.update(takers)
            publication.finished.update(finished)
            publication.contested = publication.contested or contested
            return self._finished(publication, None) + self._serve(publication)

        if arbiter is not None:
            # What this node's ranks told the old arbiter may have come too late.
            for one in publication.finished & set(node.own_ranks):
                node.tell(arbiter, frame("finish", self.epoch, *publication.name, one, None))

        return self._serve(publication)

    def waiters(self) -> list[Waiter]:
        """Every thread that waits for a key."""
        waiting = [waiter for getters in self._getters.values() for waiter in getters]
        asking = [waiter for waiters in self._questions.values() for waiter in waiters]
        return waiting + asking + [waiter for found in self._names.values() for waiter in found.waiters]

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more."""
        failed: list[Waiter] = []
        for key, getters in self._getters.items():
            failed += settle(getters, partial(self._why_no_get, key))

        for publication in self._names.values():
            failed += settle(publication.waiters, partial(self._why_no_finish, publication))

        for waiters in self._questions.values():
            failed += settle(waiters, lambda waiter: self._presence.over(waiter.rank, "src_set"))

        return failed

    # What other nodes say

    def _handle(self, handler: Any, peer: int, message: Message) -> Iterable[Waiter]:  # noqa: ANN401
        epoch = message.fields[0]
        if epoch > self.epoch:
            self._early.append((peer, message))  # its node has passed a reset that this one has yet to hear of
            return ()

        # Of an older one: about keys that are gone. Who asked knows, or will soon.
        return handler(peer, message) if epoch == self.epoch else ()  # type: ignore[no-any-return]

    def _on_set(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, key, get_count, described = message.fields
        own = next((found for found in self._live.get(key, ()) if self._arbiter(found) == self._node.index), None)
        woken: list[Waiter] = []
        if own is not None and own.owner in self._node.own_ranks:
            # Two ranks set it at the same time. Every node decides alike: the lower rank's counts.
            if own.owner < owner:
                return ()

            text = self._in_use_text(own.owner, own, by=owner)
            own.void = lambda: KeyInUseError(text)
            woken += settle(own.waiters, lambda _: own.void)
            self._abandon(own)
            self._forget(own)
            self._node.tell_all(frame("free", self.epoch, *own.name), lazily=True)

        value = self._arrived(self._node.homes[owner], described, message.body)
        publication = Publication(owner, number, key, get_count, value, get_count < self._presence.world_size - 1)
        self._add(publication)
        return woken + self._serve(publication)

    def _on_claim(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, rank = message.fields
        publication = self._names.get((owner, number))
        return self._answer(publication, rank, peer) if publication is not None else ()

    def _on_grant(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, rank, granted = message.fields
        publication = self._names.get((owner, number))
        if publication is None:
            return ()

        publication.asked.discard(rank)
        if not granted:
            publication.refused.add(rank)
            waiting = [waiter for waiter in self._getters.get(publication.key, ()) if waiter.rank == rank]
            return settle(waiting, self._timed_out(publication.key)) + settle(
                waiting, partial(self._why_no_get, publication.key)
            )

        publication.takers.add(rank)
        waiter = self._getter(publication.key, rank)
        if waiter is None:
            self._keep(publication, rank)
            return ()

        return [self._hand(publication, waiter)]

    def _on_finish(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, rank, mark = message.fields
        publication = self._names.get((owner, number))
        if publication is None:
            return ()

        publication.takers.add(rank)
        publication.finished.add(rank)
        return self._finished(publication, None if mark is None else (peer, mark))

    def _on_free(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number = message.fields
        publication = self._names.get((owner, number))
        if publication is not None and not publication.borrowers & set(self._node.own_ranks):
            self._forget(publication)

        return ()

    def _on_contest(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number = message.fields
        publication = self._names.get((owner, number))
        takers: list[int] = []
        if publication is not None:
            publication.contested = True
            takers = sorted(publication.takers & set(self._node.own_ranks))

        self._node.tell(peer, frame("taken", self.epoch, owner, number, takers))
        return ()

    def _on_taken(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, takers = message.fields
        publication = self._names.get((owner, number))
        if publication is None:
            return ()

        publication.takers.update(takers)
        publication.awaited.discard(peer)
        return self._answer_all(publication)

    def _on_live_asked(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number = message.fields
        self._node.tell(peer, frame("live", self.epoch, owner, number, (owner, number) in self._names))
        return ()

    def _on_live(self, peer: int, message: Message) -> Iterable[Waiter]:
        _, owner, number, live = message.fields
        if not live:
            publication = self._names.get((owner, number))
            if publication is not None:
                self._forget(publication)

        waiters = [waiter for waiter in self._questions.pop((owner, number), ()) if not waiter.settled]
        for waiter in waiters:
            waiter.done, waiter.result = True, live

        return waiters

    # What is decided here. Under the mutex.

    def _arbiter(self, publication: Publication) -> int | None:
        closed = self._presence.closed
        if publication.owner not in closed:
            return self._node.homes[publication.owner]

        return next((home for rank, home in enumerate(self._node.homes) if rank not in closed), None)

    def _take(self, publication: Publication, rank: int) -> bool:
        """Give a rank of this node its share, if that can be done without asking another node."""
        if publication.value is None:
            return False

        if rank in publication.granted:
            publication.granted.discard(rank)
            return True

        if rank in publication.takers:
            return False

        world_size = self._presence.world_size
        if rank == publication.owner and not publication.contested and publication.get_count < world_size:
            self._contest(publication)

        if publication.contested and (
            self._arbiter(publication) != self._node.index
            or publication.awaited
            or len(publication.takers) >= publication.get_count
        ):
            return False

        publication.takers.add(rank)
        return True

    def _contest(self, publication: Publication) -> None:
        """The shares are just enough for the other ranks, and the producer wants one: who has taken one?"""
        publication.contested = True
        publication.awaited = {node for node in self._node.links if node not in self._node.gone}
        self._node.tell_all(frame("contest", self.epoch, *publication.name))

    def _claim(self, publication: Publication, rank: int) -> None:
        """Ask for a share, for a rank of this node that waits."""
        if publication.value is None or not publication.contested or rank in publication.takers:
            return

        arbiter = self._arbiter(publication)
        if arbiter == self._node.index:
            if publication.awaited:
                publication.claims.append((rank, arbiter))
        elif arbiter is not None and rank not in publication.asked | publication.refused:
            publication.asked.add(rank)
            self._node.tell(arbiter, frame("claim", self.epoch, *publication.name, rank))

    def _answer(self, publication: Publication, rank: int, home: int) -> list[Waiter]:
        """Grant or refuse a share that was claimed."""
        if publication.awaited:
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

            self._node.tell(home, frame("grant", self.epoch, *publication.name, rank, granted))
            return []

        waiter = self._getter(publication.key, rank)
        if not granted or waiter is None:
            return []

        publication.takers.add(rank)
        return [self._hand(publication, waiter)]

    def _answer_all(self, publication: Publication) -> list[Waiter]:
        if publication.awaited:
            return []

        claims, publication.claims = publication.claims, []
        return [waiter for rank, home in claims for waiter in self._answer(publication, rank, home)]

    def node_gone(self, node: int) -> list[Waiter]:
        """A node has nothing more to say."""
        woken: list[Waiter] = []
        for publication in self._names.values():
            if node in publication.awaited:
                publication.awaited.discard(node)
                woken += self._answer_all(publication)

        return woken

    def _serve(self, publication: Publication) -> list[Waiter]:
        """Hand shares to the ranks that wait here, or claim some for them."""
        woken = []
        for waiter in list(self._getters.get(publication.key, ())):
            if waiter.settled:
                continue

            if self._take(publication, waiter.rank):
                woken.append(self._hand(publication, waiter))
            else:
                self._claim(publication, waiter.rank)

        return woken

    def _hand(self, publication: Publication, waiter: Waiter) -> Waiter:
        waiter.done, waiter.result = True, publication
        self._drop_getter(publication.key, waiter)
        return waiter

    def _keep(self, publication: Publication, rank: int) -> None:
        """A share that nobody waits for any more stays the rank's."""
        if publication.value is not None and rank not in publication.finished:
            publication.granted.add(rank)

    def _finished(self, publication: Publication, mark: Any) -> list[Waiter]:  # noqa: ANN401
        """At the arbiter: somebody has finished. The last one lets the tensor go and wakes the producer."""
        if mark is not None:
            publication.marks.append(mark)

        if len(publication.finished) < publication.get_count:
            return []

        woken = [waiter for waiter in publication.waiters if not waiter.settled]
        for waiter in woken:
            waiter.done = True

        if woken:
            self._free(publication)  # its producer waits already: the thread it wakes has nothing left to do
        elif publication.owner in self._presence.closed:
            self._abandon(publication)  # it never will
            self._free(publication)
        else:
            self._let_go(publication)

        return woken

    def _add(self, publication: Publication) -> None:
        self._live.setdefault(publication.key, []).append(publication)
        self._names[publication.name] = publication

    def _free(self, publication: Publication) -> None:
        self._forget(publication)
        self._node.tell_all(frame("free", self.epoch, *publication.name), lazily=True)

    def _forget(self, publication: Publication) -> None:
        if self._names.pop(publication.name, None) is None:
            return

        live = self._live[publication.key]
        live.remove(publication)
        if not live:
            del self._live[publication.key]

        self._let_go(publication)

    def _abandon(self, publication: Publication) -> None:
        """Its producer will not wait for it."""
        outlet, publication.outlet = publication.outlet, None
        if outlet is not None:
            self._node.jobs.append(partial(outlet.abandon, publication.marks))

    def _let_go(self, publication: Publication) -> None:
        value = publication.value
        if value is not None:
            publication.value = None
            value.finished()
            self._node.trash.append(value)  # tensors are not freed under the mutex

    def _getter(self, key: str, rank: int) -> Waiter | None:
        return next((w for w in self._getters.get(key, ()) if w.rank == rank and not w.settled), None)

    def _drop_getter(self, key: str, waiter: Waiter) -> None:
        getters = self._getters.get(key, [])
        if waiter in getters:
            getters.remove(waiter)
            if not getters:
                del self._getters[key]

    def _in_use(self, key: str) -> Publication | None:
        return next(iter(self._live.get(key, ())), None)

    def _ask(self, publication: Publication, rank: int) -> Waiter:
        """Ask the arbiter whether a publication is live."""
        raise_if(self._presence.over(rank, f"src_set({publication.key!r})"))
        waiter = Waiter(rank)
        self._questions.setdefault(publication.name, []).append(waiter)
        arbiter = self._arbiter(publication)
        assert arbiter is not None, "this rank is here"
        self._node.tell(arbiter, frame("live?", self.epoch, *publication.name))
        return waiter

    # Why a wait can't end well, and what messages say

    def _why_no_get(self, key: str, waiter: Waiter) -> Failure | None:
        if self._presence.complete and not self.resetting():
            return None

        rank = waiter.rank
        what = f"dest_get({key!r})"
        common = self._presence.over(rank, what)
        others = self._presence.others(rank)
        if common is not None:
            # A share of what is set here can still be granted.
            return None if self._promised(key, rank) else common

        if not others:
            return None

        if others <= self._presence.closed:
            return self._presence.lost(rank, sorted(others), what)

        if others <= self._presence.closed | set(self.resetting()):
            text = f"{self._presence.me(rank)}, {what}: every other rank is in reset(), so nobody can set the key"
            return lambda: AbortedError(text)

        return None

    def _promised(self, key: str, rank: int) -> bool:
        """A share has been claimed, or can be, and a process that is alive will answer."""
        return any(
            publication.contested
            and publication.value is not None
            and rank not in publication.takers | publication.refused
            and publication.owner not in self._presence.died
            and self._arbiter(publication) not in (None, self._node.index)
            for publication in self._live.get(key, ())
        )

    def _why_no_finish(self, publication: Publication, waiter: Waiter) -> Failure | None:
        if publication.void is not None or self._presence.complete:
            return publication.void

        rank = waiter.rank
        what = f"src_wait_until_get_finished({publication.key!r})"
        common = self._presence.over(rank, what)
        if common is not None:
            return common

        stuck = publication.borrowers & self._presence.closed
        if stuck:
            return self._presence.lost(rank, sorted(stuck), what)

        others = self._presence.others(rank) - publication.takers
        gone = others & self._presence.closed
        if gone and publication.get_count - len(publication.takers) > len(others - gone):
            return self._presence.lost(rank, sorted(gone), what)

        return None

    def _bad_finish(self, rank: int, key: str) -> Exception:
        if (rank, key) in self._orphans:
            self._orphans.discard((rank, key))
            return AbortedError(f"{self._presence.at(key)}: the borrow of rank {rank} ended when the store was reset")

        if any(rank in publication.finished for publication in self._live.get(key, ())):
            return ProtocolError(f"{self._presence.at(key)}: rank {rank} has finished it already")

        return ProtocolError(f"{self._presence.at(key)}: rank {rank} finishes what it has not got; call dest_get first")

    def _bad_wait(self, rank: int, key: str) -> Exception:
        publication = self._in_use(key)
        if publication is None:
            return ProtocolError(
                f"{self._presence.at(key)}: rank {rank} waits for a key that is not set; call src_set first"
            )

        return ProtocolError(
            f"{self._presence.at(key)}: rank {rank} waits for its consumers, but rank {publication.owner} set it; "
            f"only the producer waits"
        )

    def _in_use_text(self, rank: int, live: Publication, by: int | None = None) -> str:
        at = self._presence.at(live.key)
        if by is not None:
            return f"{at}: rank {rank} and rank {by} set it at the same time, and that of rank {by} counts"

        return (
            f"{at}: rank {rank} can't set it: it is live, set by rank {live.owner}, which has to call "
            f"src_wait_until_get_finished({live.key!r}) first"
        )

    def _late_get(self, rank: int, key: str, timeout: float) -> str:
        head = f"{self._presence.at(key)}: rank {rank} waited {seconds(timeout)} in dest_get, and "
        publication = self._in_use(key)
        if publication is None:
            return head + f"no rank has set it: {rank_list(self._presence.others(rank))} had not come"

        if rank in publication.takers:
            had = f"of which rank {rank} has had its share"
        elif rank in publication.asked:
            had = "and has not answered who gets one"
        else:
            had = "all taken by others"

        return head + (
            f"rank {publication.owner} has set it for {count(publication.get_count, 'consumer')}, {had}; rank {rank} "
            f"has to wait for the next time it is set"
        )

    def _late_finish(self, rank: int, publication: Publication, timeout: float) -> str:
        head = (
            f"{self._presence.at(publication.key)}: rank {rank} waited {seconds(timeout)} for "
            f"{count(publication.get_count, 'consumer')}: {len(publication.finished)} finished"
        )
        if publication.borrowers:
            head += f", {rank_list(publication.borrowers)} got it and did not finish"

        left = publication.get_count - len(publication.takers)
        if left:
            others = set(range(self._presence.world_size)) - publication.takers
            head += f", {left} did not come or did not finish (of {rank_list(others)})"

        return head

    def _timed_out(self, key: str) -> Callable[[Waiter], Failure | None]:
        def failure_of(waiter: Waiter) -> Failure | None:
            late = waiter.result
            if not isinstance(late, _Late):
                return None

            return lambda: StoreTimeoutError(self._late_get(waiter.rank, key, late))

        return failure_of
