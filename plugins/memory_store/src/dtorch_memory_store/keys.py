"""The keys of one opening: what is published, who has borrowed it, and who waits for it.

Each waiting thread sleeps on a lock of its own, so a change of one key wakes only those who wait for that key. A share
is handed to a waiting rank by whoever sets the key, so that nobody else can take it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from dtorch_core._text import count, rank_list, seconds
from dtorch_core.errors import AbortedError, KeyInUseError, ProtocolError, StoreTimeoutError
from dtorch_core.presence import Failure, Presence, raise_if
from dtorch_memory_store.publication import Publication
from dtorch_memory_store.waiting import Owed, Waiter, fail, wake, wake_all


class Keys:
    """The four steps. They take the mutex; the rest is called under it."""

    def __init__(self, presence: Presence, resetting: Collection[int], owed: Owed) -> None:
        self._presence = presence
        self._owed = owed
        self._resetting = resetting
        self._keys: dict[str, Publication] = {}
        self._getters: dict[str, list[Waiter]] = {}
        self._orphans: set[tuple[int, str]] = set()
        self.uses_events = False
        """A CUDA tensor has been published: from then on borrows end with an event."""

    def put(self, key: str, publication: Publication) -> None:
        """Set a key and hand shares to the ranks that wait for it."""
        try:
            with self._presence.mutex:
                self._presence.check_open(publication.owner)
                live = self._keys.get(key)
                if live is not None:
                    raise KeyInUseError(
                        f"{self._presence.at(key)}: rank {publication.owner} can't set it: it is live, set by rank "
                        f"{live.owner}, which has to call src_wait_until_get_finished({key!r}) first"
                    )

                self._keys[key] = publication
                woken = self._serve(key, publication) if key in self._getters else ()

            wake(woken, self._owed)
        except BaseException:  # Ctrl-C: it may be set
            self.mend()
            raise

    def get(self, rank: int, key: str, timeout: float) -> Publication:
        """Take a share of the key's next generation, waiting for it."""
        deadline = time.monotonic() + timeout
        taken: Publication | None = None
        waiter: Waiter | None = None
        try:
            with self._presence.mutex:
                self._presence.check_open(rank)
                publication = self._keys.get(key)
                if publication is not None and publication.has_share_for(rank):
                    publication.takers, taken = publication.takers | {rank}, publication
                    return publication

                waiter = Waiter(rank)
                raise_if(self._why_no_get(key, waiter))
                self._getters.setdefault(key, []).append(waiter)

            waiter.sleep(deadline - time.monotonic())
            if not waiter.done:
                self._end_get(rank, key, timeout, waiter)

            handed: Publication = waiter.result
            return handed
        except BaseException:  # Ctrl-C: give back what may just have been handed over
            with self._presence.mutex:
                if waiter is not None:
                    self._drop_getter(key, waiter)
                    taken = waiter.result

                if taken is not None and self._keys.get(key) is taken:
                    taken.takers = taken.takers - {rank}

            self.mend()
            raise

    def _end_get(self, rank: int, key: str, timeout: float, waiter: Waiter) -> None:
        """A wait that was woken without a share: return if one came at the last moment, else raise why not."""
        with self._presence.mutex:
            if waiter.done:
                return

            self._drop_getter(key, waiter)
            raise_if(waiter.error)
            raise StoreTimeoutError(self._late_get(rank, key, timeout))

    def borrowed(self, rank: int, key: str) -> Tensor | None:
        """The tensor that ``rank`` has borrowed; None if it has none. (:meth:`finish` says what is wrong.)"""
        publication = self._keys.get(key)
        return publication.tensor if publication is not None and rank in publication.borrowers else None

    def finish(self, rank: int, key: str, event: torch.cuda.Event | None) -> None:
        """End a borrow; the last one lets the tensor go and wakes the producer."""
        woken: list[Waiter] = []
        dropped: Tensor | None = None  # freed on return: not under the mutex
        try:
            with self._presence.mutex:
                publication = self._keys.get(key)
                if publication is None or rank not in publication.takers or rank in publication.finished:
                    raise self._bad_finish(rank, key, publication)

                if event is not None:
                    publication.events.append(event)

                if self._orphans:
                    self._orphans.discard((rank, key))

                publication.finished.add(rank)
                if len(publication.finished) == publication.get_count:
                    dropped, publication.tensor = publication.tensor, None
                    woken = self._all_finished(key, publication)

            wake(woken, self._owed)
        except BaseException:  # Ctrl-C: it may be finished
            self.mend()
            raise

        del dropped

    def wait(self, rank: int, key: str, timeout: float) -> Publication:
        """Wait until all have finished, then free the key: what it held, and the events of its consumers."""
        deadline = time.monotonic() + timeout
        publication: Publication | None = None
        waiter: Waiter | None = None
        freed = False
        try:
            with self._presence.mutex:
                self._presence.check_open(rank)
                publication = self._keys.get(key)
                if publication is None or publication.owner != rank:
                    raise self._bad_wait(rank, key, publication)

                if len(publication.finished) == publication.get_count:
                    freed = True
                    del self._keys[key]
                    return publication

                waiter = Waiter(rank)
                raise_if(self._why_no_finish(key, publication, waiter))
                publication.waiters.append(waiter)

            waiter.sleep(deadline - time.monotonic())
            if waiter.done:  # the last to finish has freed the key
                return publication

            with self._presence.mutex:
                if waiter.done:
                    return publication

                publication.waiters.remove(waiter)
                raise_if(waiter.error)
                raise StoreTimeoutError(self._late_finish(rank, key, publication, timeout))
        except BaseException:  # Ctrl-C: the wait can be repeated
            with self._presence.mutex:
                if waiter is not None and publication is not None and waiter in publication.waiters:
                    publication.waiters.remove(waiter)

                if publication is not None and (freed or (waiter is not None and waiter.done)):
                    self._keys.setdefault(key, publication)

            self.mend()
            raise

    def drop(self) -> list[Publication]:
        """Forget every key. What is returned holds tensors, to be let go outside the mutex."""
        dropped = list(self._keys.values())
        self._orphans.update((rank, key) for key, publication in self._keys.items() for rank in publication.borrowers)
        self._keys.clear()
        return dropped

    def abandon(self, owner: int) -> None:
        """Free the finished keys of a rank that leaves without having waited for them."""
        for key in [key for key, found in self._keys.items() if found.owner == owner and found.tensor is None]:
            del self._keys[key]

    def waiters(self) -> list[Waiter]:
        """Every thread that waits for a key."""
        waiting = [waiter for getters in self._getters.values() for waiter in getters]
        return waiting + [waiter for publication in self._keys.values() for waiter in publication.waiters]

    def give_up(self) -> None:
        """Fail the waits that can't end well any more. Under the mutex."""
        for key, getters in self._getters.items():
            fail(getters, partial(self._why_no_get, key), self._owed)

        for key, publication in self._keys.items():
            fail(publication.waiters, partial(self._why_no_finish, key, publication), self._owed)

    def mend(self) -> None:
        """End what interrupted threads have left, and wake whom they had to. Takes the mutex."""
        dropped = []  # freed on return: not under the mutex
        with self._presence.mutex:
            for key, publication in list(self._keys.items()):
                if len(publication.finished) == publication.get_count:
                    dropped.append(publication.tensor)
                    publication.tensor = None
                    self._all_finished(key, publication)
                elif key in self._getters:
                    self._serve(key, publication)

        wake_all(self._owed)

    def _why_no_get(self, key: str, waiter: Waiter) -> Failure | None:
        if self._presence.complete and not self._resetting:
            return None

        rank = waiter.rank
        what = f"dest_get({key!r})"
        common = self._presence.over(rank, what)
        others = self._presence.others(rank)
        if common is not None or not others:
            return common

        if others <= self._presence.closed:
            return self._presence.lost(rank, sorted(others), what)

        if others <= self._presence.closed | set(self._resetting):
            text = f"{self._presence.me(rank)}, {what}: every other rank is in reset(), so nobody can set the key"
            return lambda: AbortedError(text)

        return None

    def _why_no_finish(self, key: str, publication: Publication, waiter: Waiter) -> Failure | None:
        if self._presence.complete:
            return None

        rank = waiter.rank
        what = f"src_wait_until_get_finished({key!r})"
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

    def _serve(self, key: str, publication: Publication) -> list[Waiter]:
        """Hand shares to those who wait for them: whom to wake."""
        served, getters = [], self._getters[key]
        for waiter in list(getters):
            if not waiter.settled and publication.has_share_for(waiter.rank):
                # One step, to a signal.
                publication.takers = publication.takers | {waiter.rank}
                waiter.done, waiter.result = True, publication
                self._owed[waiter] = None
                served.append(waiter)

            if waiter.done:
                getters.remove(waiter)

        if not getters:
            del self._getters[key]

        return served

    def _all_finished(self, key: str, publication: Publication) -> list[Waiter]:
        """Tell its producer, if that waits: whom to wake."""
        woken = [waiter for waiter in publication.waiters if waiter.error is None]
        if woken or publication.owner in self._presence.closed:
            # Its producer waits already, so that the thread it wakes has nothing left to do, or never will.
            for waiter in woken:
                waiter.done = True
                self._owed[waiter] = None

            del self._keys[key]

        return woken

    def _drop_getter(self, key: str, waiter: Waiter) -> None:
        getters = self._getters.get(key, [])
        if waiter in getters:
            getters.remove(waiter)
            if not getters:
                del self._getters[key]

    def _bad_finish(self, rank: int, key: str, publication: Publication | None) -> Exception:
        if (rank, key) in self._orphans:
            self._orphans.discard((rank, key))
            return AbortedError(f"{self._presence.at(key)}: the borrow of rank {rank} ended when the store was reset")

        if publication is not None and rank in publication.finished:
            return ProtocolError(f"{self._presence.at(key)}: rank {rank} has finished it already")

        return ProtocolError(f"{self._presence.at(key)}: rank {rank} finishes what it has not got; call dest_get first")

    def _bad_wait(self, rank: int, key: str, publication: Publication | None) -> Exception:
        if publication is None:
            return ProtocolError(
                f"{self._presence.at(key)}: rank {rank} waits for a key that is not set; call src_set first"
            )

        return ProtocolError(
            f"{self._presence.at(key)}: rank {rank} waits for its consumers, but rank {publication.owner} set it; "
            f"only the producer waits"
        )

    def _late_get(self, rank: int, key: str, timeout: float) -> str:
        head = f"{self._presence.at(key)}: rank {rank} waited {seconds(timeout)} in dest_get, and "
        publication = self._keys.get(key)
        if publication is None:
            return head + f"no rank has set it: {rank_list(self._presence.others(rank))} had not come"

        return head + (
            f"rank {publication.owner} has set it for {count(publication.get_count, 'consumer')} only, taken by "
            f"{rank_list(publication.takers)}; rank {rank} has to wait for the next time it is set"
        )

    def _late_finish(self, rank: int, key: str, publication: Publication, timeout: float) -> str:
        head = (
            f"{self._presence.at(key)}: rank {rank} waited {seconds(timeout)} for "
            f"{count(publication.get_count, 'consumer')}: {len(publication.finished)} finished"
        )
        if publication.borrowers:
            head += f", {rank_list(publication.borrowers)} got it and did not finish"

        left = publication.get_count - len(publication.takers)
        if left:
            others = set(range(self._presence.world_size)) - publication.takers
            head += f", {left} did not come (of {rank_list(others)})"

        return head
