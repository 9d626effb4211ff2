"""The state that the ranks of one memory store share: keys, borrows, waits, and who has left.

One mutex guards it, for a few microseconds at a time: no thread sleeps, calls torch or wakes another one under it.
Each waiting thread sleeps on a lock of its own, so a change of one key wakes only those who wait for that key.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dtorch_core._text import count, rank_list, seconds
from dtorch_core.errors import AbortedError, KeyInUseError, PeerLostError, ProtocolError, StoreTimeoutError
from dtorch_memory_store.waiting import Gate, Waiter

Failure = Callable[[], Exception]


class Publication:
    """One generation of one key."""

    __slots__ = ("borrowers", "events", "finished", "get_count", "owner", "ready", "takers", "tensor", "waiters")

    def __init__(self, owner: int, tensor: Tensor, get_count: int, ready: torch.cuda.Event | None) -> None:
        self.owner = owner
        self.tensor: Tensor | None = tensor
        self.get_count = get_count
        self.ready = ready
        self.takers: set[int] = set()
        self.borrowers: set[int] = set()
        self.finished: set[int] = set()
        self.events: list[torch.cuda.Event] = []
        self.waiters: list[Waiter] = []

    def take(self, rank: int) -> bool:
        """Hand a share to ``rank`` if one is left and it has had none."""
        if len(self.takers) == self.get_count or rank in self.takers:
            return False

        self.takers.add(rank)
        self.borrowers.add(rank)
        return True

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.get_count


class Session:
    """One opening of one memory store."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.world_size = world_size
        self.uses_events = False
        """A CUDA tensor has been published: from then on borrows end with an event."""
        self.mutex = threading.Lock()
        self._keys: dict[str, Publication] = {}
        self._getters: dict[str, list[Waiter]] = {}
        self._barrier = Gate("barrier", world_size)
        self._reset = Gate("reset", world_size)
        self._closed: set[int] = set()
        self._died: dict[int, str] = {}
        self._aborted: str | None = None
        self._orphans: set[tuple[int, str]] = set()

    # The four steps

    def put(self, key: str, publication: Publication) -> None:
        """Set a key and hand shares to the ranks that wait for it."""
        with self.mutex:
            self._check_open(publication.owner)
            live = self._keys.get(key)
            if live is not None:
                raise KeyInUseError(
                    f"{self._at(key)}: rank {publication.owner} can't set it: it is live, set by rank {live.owner}, "
                    f"which has to call src_wait_until_get_finished({key!r}) first"
                )

            self._keys[key] = publication
            woken = self._serve(key, publication) if key in self._getters else ()

        wake(woken)

    def get(self, rank: int, key: str, timeout: float) -> Publication:
        """Take a share of the key's next generation, waiting for it."""
        deadline = time.monotonic() + timeout
        with self.mutex:
            self._check_open(rank)
            publication = self._keys.get(key)
            if publication is not None and publication.take(rank):
                return publication

            self._raise_if(self._why_no_get(rank, key))
            waiter = Waiter(rank)
            self._getters.setdefault(key, []).append(waiter)

        try:
            waiter.sleep(deadline - time.monotonic())
        except BaseException:  # Ctrl-C: give back what may just have been handed over
            with self.mutex:
                woken = self._untake(key, waiter)

            wake(woken)
            raise

        if not waiter.done:
            self._end_get(rank, key, timeout, waiter)

        publication = waiter.result
        assert publication is not None, "done means that a share was handed over"
        return publication

    def _end_get(self, rank: int, key: str, timeout: float, waiter: Waiter) -> None:
        """A wait that was woken without a share: return if one came at the last moment, else raise why not."""
        with self.mutex:
            if waiter.done:
                return

            self._drop_getter(key, waiter)
            self._raise_if(waiter.error)
            raise StoreTimeoutError(self._late_get(rank, key, timeout))

    def borrowed(self, rank: int, key: str) -> Tensor | None:
        """The tensor that ``rank`` has borrowed; None if it has none. (:meth:`finish` says what is wrong.)"""
        publication = self._keys.get(key)
        return publication.tensor if publication is not None and rank in publication.borrowers else None

    def finish(self, rank: int, key: str, event: torch.cuda.Event | None) -> None:
        """End a borrow; the last one lets the tensor go and wakes the producer."""
        woken: list[Waiter] = []
        dropped: Tensor | None = None  # freed on return: not under the mutex
        with self.mutex:
            publication = self._keys.get(key)
            if publication is None or rank not in publication.borrowers:
                raise self._bad_finish(rank, key, publication)

            publication.borrowers.remove(rank)
            publication.finished.add(rank)
            if event is not None:
                publication.events.append(event)

            if self._orphans:
                self._orphans.discard((rank, key))

            if publication.complete:
                dropped, publication.tensor = publication.tensor, None
                woken = [waiter for waiter in publication.waiters if not waiter.settled]
                if woken:
                    # Its producer waits already: the key is free, and the thread it wakes has nothing left to do.
                    del self._keys[key]
                    for waiter in woken:
                        waiter.done = True

        wake(woken)
        del dropped

    def wait(self, rank: int, key: str, timeout: float) -> list[torch.cuda.Event]:
        """Wait until all have finished, then free the key: the events to order the producer's stream after."""
        deadline = time.monotonic() + timeout
        with self.mutex:
            self._check_open(rank)
            publication = self._keys.get(key)
            if publication is None or publication.owner != rank:
                raise self._bad_wait(rank, key, publication)

            if publication.complete:
                del self._keys[key]
                return publication.events

            self._raise_if(self._why_no_finish(rank, key, publication))
            waiter = Waiter(rank)
            publication.waiters.append(waiter)

        try:
            waiter.sleep(deadline - time.monotonic())
        except BaseException:  # Ctrl-C: the wait can be repeated
            with self.mutex:
                if waiter.done:
                    self._keys.setdefault(key, publication)
                else:
                    publication.waiters.remove(waiter)

            raise

        if waiter.done:  # the last to finish has freed the key
            return publication.events

        with self.mutex:
            if waiter.done:
                return publication.events

            publication.waiters.remove(waiter)
            self._raise_if(waiter.error)
            raise StoreTimeoutError(self._late_finish(rank, key, publication, timeout))

    # All ranks together

    def barrier(self, rank: int, timeout: float) -> None:
        """Wait for every rank."""
        self._pass(self._barrier, rank, timeout, lambda: [])

    def reset(self, rank: int, timeout: float) -> None:
        """Drop every key, once all ranks are here. This rank's other waits are over at once."""
        with self.mutex:
            called = f"{self._me(rank)}: it called reset()"
            woken = self._fail_waits_of({rank}, lambda: AbortedError(called), self._barrier)

        wake(woken)
        dropped: list[Publication] = []  # freed on return: not under the mutex
        self._pass(self._reset, rank, timeout, lambda: self._drop_keys(dropped))

    # Leaving

    def close(self, rank: int) -> None:
        """Say goodbye: waits that only this rank could satisfy end."""
        with self.mutex:
            if rank in self._closed:
                return

            self._closed.add(rank)
            closed = f"{self._me(rank)}: it was closed"
            woken = self._fail_waits_of({rank}, lambda: AbortedError(closed), self._barrier, self._reset)
            woken += self._reconsider()

        wake(woken)

    def die(self, rank: int, reason: str) -> None:
        """The rank failed: every wait that is not satisfied ends, now and later."""
        with self.mutex:
            self._died.setdefault(rank, reason)
            woken = self._reconsider()

        wake(woken)

    def abort(self, reason: str) -> None:
        """End every wait of every rank, now and later."""
        with self.mutex:
            self._aborted = self._aborted or reason
            woken = self._reconsider()

        wake(woken)

    # Why a wait can't end well: asked when it begins, and again whenever somebody leaves

    def failure(self, rank: int, needed: Iterable[int], what: str) -> Failure | None:
        """Why ``rank`` can't wait for something that every one of ``needed`` has to do; None if it can."""
        gone = [other for other in needed if other in self._closed]
        return self._common_failure(rank, what) or (self._lost(rank, gone, what) if gone else None)

    def _common_failure(self, rank: int, what: str) -> Failure | None:
        # A death first: whoever ends the run because of it aborts the other ranks' handles as well.
        if self._died:
            dead, why = next(iter(self._died.items()))
            text = f"{self._me(rank)}, {what}: rank {dead} (pid {os.getpid()}) was lost: {why}; open the store anew"
            return lambda: PeerLostError(text)

        if self._aborted is not None:
            reason = f"{self._me(rank)}, {what}: {self._aborted}"
            return lambda: AbortedError(reason)

        return None

    def _lost(self, rank: int, gone: list[int], what: str) -> Failure:
        text = (
            f"{self._me(rank)}, {what}: {rank_list(gone)} (pid {os.getpid()}) closed the store, and no remaining rank "
            f"can do it"
        )
        return lambda: PeerLostError(text)

    def _why_no_get(self, rank: int, key: str) -> Failure | None:
        what = f"dest_get({key!r})"
        common = self._common_failure(rank, what)
        others = set(range(self.world_size)) - {rank}
        if common is not None or not others:
            return common

        if others <= self._closed:
            return self._lost(rank, sorted(others), what)

        if others <= self._closed | set(self._reset.waiters):
            text = f"{self._me(rank)}, {what}: every other rank is in reset(), so nobody can set the key"
            return lambda: AbortedError(text)

        return None

    def _why_no_finish(self, rank: int, key: str, publication: Publication) -> Failure | None:
        what = f"src_wait_until_get_finished({key!r})"
        common = self._common_failure(rank, what)
        if common is not None:
            return common

        stuck = publication.borrowers & self._closed
        if stuck:
            return self._lost(rank, sorted(stuck), what)

        others = set(range(self.world_size)) - {rank} - publication.takers
        gone = others & self._closed
        if gone and publication.get_count - len(publication.takers) > len(others - gone):
            return self._lost(rank, sorted(gone), what)

        return None

    def _why_no_gate(self, gate: Gate, rank: int) -> Failure | None:
        what = f"{gate.name}()"
        failure = self.failure(rank, gate.missing(), what)
        resetting = [other for other in gate.missing() if other in self._reset.waiters]
        if failure is None and resetting and gate is not self._reset:
            text = f"{self._me(rank)}, {what}: {rank_list(resetting)} called reset() instead"
            return lambda: AbortedError(text)

        return failure

    def reconsider_more(self) -> list[Waiter]:
        """For what is built on this class: its own waits that have become hopeless."""
        return []

    def _reconsider(self) -> list[Waiter]:
        woken = self.reconsider_more()

        def settle(waiter: Waiter, failure: Failure | None) -> None:
            if failure is not None and not waiter.settled:
                waiter.error = failure
                woken.append(waiter)

        for key, getters in self._getters.items():
            for waiter in getters:
                settle(waiter, self._why_no_get(waiter.rank, key))

        for key, publication in self._keys.items():
            for waiter in publication.waiters:
                settle(waiter, self._why_no_finish(waiter.rank, key, publication))

        for gate in (self._barrier, self._reset):
            for waiter in gate.waiters.values():
                settle(waiter, self._why_no_gate(gate, waiter.rank))

            gate.turn_away()

        return woken

    def _fail_waits_of(self, ranks: set[int], failure: Failure, *gates: Gate) -> list[Waiter]:
        waiters = [waiter for getters in self._getters.values() for waiter in getters]
        waiters += [waiter for publication in self._keys.values() for waiter in publication.waiters]
        waiters += [waiter for gate in gates for waiter in gate.waiters.values()]
        woken = [waiter for waiter in waiters if waiter.rank in ranks and not waiter.settled]
        for waiter in woken:
            waiter.error = failure

        for gate in gates:
            gate.turn_away()

        return woken

    # Helpers; all but _pass run under the mutex

    def _pass(self, gate: Gate, rank: int, timeout: float, last: Callable[[], list[Waiter]]) -> None:
        deadline = time.monotonic() + timeout
        woken: list[Waiter] = []
        with self.mutex:
            self._check_open(rank)
            if rank in gate.waiters:
                raise ProtocolError(f"{self._me(rank)}: another thread of this rank is in {gate.name}() already")

            waiter = gate.arrive(rank)
            if waiter.done:
                woken = last() + [other for other in gate.open() if other is not waiter]
            else:
                failure = self._why_no_gate(gate, rank)
                if failure is not None:
                    del gate.waiters[rank]
                    raise failure()

                woken = self._reconsider() if gate is self._reset else []

        wake(woken)
        if waiter.done:
            return

        try:
            waiter.sleep(deadline - time.monotonic())
        finally:
            with self.mutex:
                missing = gate.missing()
                if gate.waiters.get(rank) is waiter:
                    del gate.waiters[rank]

        if not waiter.done:
            self._raise_if(waiter.error)
            raise StoreTimeoutError(
                f"{self._me(rank)}, {gate.name}(): {rank_list(missing)} had not come after {seconds(timeout)}"
            )

    def _serve(self, key: str, publication: Publication) -> list[Waiter]:
        getters = self._getters.get(key)
        if not getters:
            return []

        served = [waiter for waiter in getters if not waiter.settled and publication.take(waiter.rank)]
        for waiter in served:
            waiter.done, waiter.result = True, publication
            self._drop_getter(key, waiter)

        return served

    def _untake(self, key: str, waiter: Waiter) -> list[Waiter]:
        publication = waiter.result
        if publication is None or self._keys.get(key) is not publication:
            self._drop_getter(key, waiter)
            return []

        publication.takers.discard(waiter.rank)
        publication.borrowers.discard(waiter.rank)
        return self._serve(key, publication)

    def _drop_getter(self, key: str, waiter: Waiter) -> None:
        getters = self._getters.get(key, [])
        if waiter in getters:
            getters.remove(waiter)
            if not getters:
                del self._getters[key]

    def _drop_keys(self, dropped: list[Publication]) -> list[Waiter]:
        # Those in reset() are through: it is they who did it.
        woken = self._fail_waits_of(
            set(range(self.world_size)),
            lambda: AbortedError(f"store {self.name!r}: it was reset meanwhile"),
            self._barrier,
        )
        for key, publication in self._keys.items():
            self._orphans.update((rank, key) for rank in publication.borrowers)

        dropped.extend(self._keys.values())
        self._keys.clear()
        return woken

    def _check_open(self, rank: int) -> None:
        if rank in self._closed:
            raise AbortedError(f"{self._me(rank)}: it is closed; open it anew")

    def _raise_if(self, failure: Failure | None) -> None:
        if failure is not None:
            raise failure()

    def _me(self, rank: int) -> str:
        return f"store {self.name!r}, rank {rank}"

    def _at(self, key: str) -> str:
        return f"store {self.name!r}, key {key!r}"

    def _bad_finish(self, rank: int, key: str, publication: Publication | None) -> Exception:
        if (rank, key) in self._orphans:
            self._orphans.discard((rank, key))
            return AbortedError(f"{self._at(key)}: the borrow of rank {rank} ended when the store was reset")

        if publication is not None and rank in publication.finished:
            return ProtocolError(f"{self._at(key)}: rank {rank} has finished it already")

        return ProtocolError(f"{self._at(key)}: rank {rank} finishes what it has not got; call dest_get first")

    def _bad_wait(self, rank: int, key: str, publication: Publication | None) -> Exception:
        if publication is None:
            return ProtocolError(f"{self._at(key)}: rank {rank} waits for a key that is not set; call src_set first")

        return ProtocolError(
            f"{self._at(key)}: rank {rank} waits for its consumers, but rank {publication.owner} set it; "
            f"only the producer waits"
        )

    def _late_get(self, rank: int, key: str, timeout: float) -> str:
        head = f"{self._at(key)}: rank {rank} waited {seconds(timeout)} in dest_get, and "
        publication = self._keys.get(key)
        if publication is None:
            return head + f"no rank has set it: {rank_list(set(range(self.world_size)) - {rank})} had not come"

        return head + (
            f"rank {publication.owner} has set it for {count(publication.get_count, 'consumer')} only, taken by "
            f"{rank_list(publication.takers)}; rank {rank} has to wait for the next time it is set"
        )

    def _late_finish(self, rank: int, key: str, publication: Publication, timeout: float) -> str:
        head = (
            f"{self._at(key)}: rank {rank} waited {seconds(timeout)} for {count(publication.get_count, 'consumer')}: "
            f"{len(publication.finished)} finished"
        )
        if publication.borrowers:
            head += f", {rank_list(publication.borrowers)} got it and did not finish"

        left = publication.get_count - len(publication.takers)
        if left:
            others = set(range(self.world_size)) - publication.takers
            head += f", {left} did not come (of {rank_list(others)})"

        return head


def wake(waiters: Sequence[Waiter]) -> None:
    """Wake settled waiters; outside the mutex."""
    for waiter in waiters:
        waiter.wake()
