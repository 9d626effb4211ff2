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
from dtorch_core.presence import Failure, Presence, raise_if, settle
from dtorch_memory_store.waiting import Waiter, wake


class Publication:
    """One generation of one key."""

    __slots__ = ("events", "finished", "get_count", "owner", "ready", "takers", "tensor", "waiters")

    def __init__(self, owner: int, tensor: Tensor, get_count: int, ready: torch.cuda.Event | None) -> None:
        self.owner = owner
        self.tensor: Tensor | None = tensor
        self.get_count = get_count
        self.ready = ready
        self.takers: set[int] = set()
        self.finished: set[int] = set()
        self.events: list[torch.cuda.Event] = []
        self.waiters: list[Waiter] = []

    def take(self, rank: int) -> bool:
        """Hand a share to ``rank`` if one is left and it has had none."""
        if len(self.takers) == self.get_count or rank in self.takers:
            return False

        self.takers.add(rank)
        return True

    @property
    def borrowers(self) -> set[int]:
        """The ranks that have taken a share and not finished."""
        return self.takers - self.finished


class Keys:
    """The four steps. They take the mutex; the rest is called under it."""

    def __init__(self, presence: Presence, resetting: Collection[int]) -> None:
        self._presence = presence
        self._resetting = resetting
        self._keys: dict[str, Publication] = {}
        self._getters: dict[str, list[Waiter]] = {}
        self._orphans: set[tuple[int, str]] = set()
        self.uses_events = False
        """A CUDA tensor has been published: from then on borrows end with an event."""

    def put(self, key: str, publication: Publication) -> None:
        """Set a key and hand shares to the ranks that wait for it."""
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

        wake(woken)

    def get(self, rank: int, key: str, timeout: float) -> Publication:
        """Take a share of the key's next generation, waiting for it."""
        deadline = time.monotonic() + timeout
        with self._presence.mutex:
            self._presence.check_open(rank)
            publication = self._keys.get(key)
            if publication is not None and publication.take(rank):
                return publication

            waiter = Waiter(rank)
            raise_if(self._why_no_get(key, waiter))
            self._getters.setdefault(key, []).append(waiter)

        try:
            waiter.sleep(deadline - time.monotonic())
        except BaseException:  # Ctrl-C: give back what may just have been handed over
            with self._presence.mutex:
                woken = self._untake(key, waiter)

            wake(woken)
            raise

        if not waiter.done:
            self._end_get(rank, key, timeout, waiter)

        handed: Publication = waiter.result
        return handed

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
        with self._presence.mutex:
            publication = self._keys.get(key)
            if publication is None or rank not in publication.takers or rank in publication.finished:
                raise self._bad_finish(rank, key, publication)

            publication.finished.add(rank)
            if event is not None:
                publication.events.append(event)

            if self._orphans:
                self._orphans.discard((rank, key))

            if len(publication.finished) == publication.get_count:
                dropped, publication.tensor = publication.tensor, None
                woken = [waiter for waiter in publication.waiters if not waiter.settled]
                if woken or publication.owner in self._presence.closed:
                    # Its producer waits already, so that the thread it wakes has nothing left to do, or never will.
                    del self._keys[key]
                    for waiter in woken:
                        waiter.done = True

        wake(woken)
        del dropped

    def wait(self, rank: int, key: str, timeout: float) -> Publication:
        """Wait until all have finished, then free the key: what it held, and the events of its consumers."""
        deadline = time.monotonic() + timeout
        with self._presence.mutex:
            self._presence.check_open(rank)
            publication = self._keys.get(key)
            if publication is None or publication.owner != rank:
                raise self._bad_wait(rank, key, publication)

            if len(publication.finished) == publication.get_count:
                del self._keys[key]
                return publication

            waiter = Waiter(rank)
            raise_if(self._why_no_finish(key, publication, waiter))
            publication.waiters.append(waiter)

        try:
            waiter.sleep(deadline - time.monotonic())
        except BaseException:  # Ctrl-C: the wait can be repeated
            with self._presence.mutex:
                if waiter.done:
                    self._keys.setdefault(key, publication)
                else:
                    publication.waiters.remove(waiter)

            raise

        if waiter.done:  # the last to finish has freed the key
            return publication

        with self._presence.mutex:
            if waiter.done:
                return publication

            publication.waiters.remove(waiter)
            raise_if(waiter.error)
            raise StoreTimeoutError(self._late_finish(rank, key, publication, timeout))

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

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more: the waiters to wake."""
        failed: list[Waiter] = []
        for key, getters in self._getters.items():
            failed += settle(getters, partial(self._why_no_get, key))

        for key, publication in self._keys.items():
            failed += settle(publication.waiters, partial(self._why_no_finish, key, publication))

        return failed

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
        getters = self._getters.get(key, ())
        if len(getters) == 1 and not getters[0].settled and publication.take(getters[0].rank):
            # What most hand-offs are: one waits for one.
            waiter = getters[0]
            waiter.done, waiter.result = True, publication
            del self._getters[key]
            return [waiter]

        served = [waiter for waiter in getters if not waiter.settled and publication.take(waiter.rank)]
        for waiter in served:
            waiter.done, waiter.result = True, publication
            self._drop_getter(key, waiter)

        return served

    def _untake(self, key: str, waiter: Waiter) -> list[Waiter]:
        publication: Publication | None = waiter.result
        if publication is None or self._keys.get(key) is not publication:
            self._drop_getter(key, waiter)
            return []

        publication.takers.discard(waiter.rank)
        return self._serve(key, publication)

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
