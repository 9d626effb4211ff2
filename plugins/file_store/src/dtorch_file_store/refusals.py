"""Why a wait for a key can't end well, and what the errors of the four steps say."""

from __future__ import annotations

from collections.abc import Callable, Collection

from dtorch_core._text import count, rank_list, seconds
from dtorch_core.errors import AbortedError, KeyInUseError, ProtocolError, StoreTimeoutError
from dtorch_core.presence import Failure, Presence
from dtorch_file_store.publications import Publication, Table
from dtorch_file_store.waiting import Waiter


class Late(float):
    """The result of a wait whose time (in seconds) is over: it waits for the answer to a claim alone."""


class Refusals:
    """All of it under the node's mutex."""

    def __init__(self, presence: Presence, table: Table, resetting: Callable[[], Collection[int]]) -> None:
        """
        :param resetting: the ranks that are in reset().
        """
        self._presence = presence
        self._table = table
        self._resetting = resetting

    def no_get(self, key: str, waiter: Waiter) -> Failure | None:
        """Why a wait for a share can't end well; None while it can."""
        if self._presence.complete and not self._resetting():
            return None

        rank = waiter.rank
        if self._promised(key, rank):
            return None  # whoever decides about it answers, also for those who have left, and from inside reset()

        what = f"dest_get({key!r})"
        common = self._presence.over(rank, what)
        others = self._presence.others(rank)
        if common is not None or not others:
            return common

        if others <= self._presence.closed:
            return self._presence.lost(rank, sorted(others), what)

        if others <= self._presence.closed | set(self._resetting()):
            text = f"{self._presence.me(rank)}, {what}: every other rank is in reset(), so nobody can set the key"
            return self._presence.ended(rank, what) or (lambda: AbortedError(text))

        return None

    def _promised(self, key: str, rank: int) -> bool:
        """A share has been claimed, or can be, and a process that is alive will answer: or this one, once it knows."""
        return any(
            publication.contested
            and publication.value is not None
            and rank not in publication.takers | publication.refused
            and self._answers(publication)
            and (bool(publication.awaited) or not self._table.decides(publication))
            for publication in self._table.of_key(key)
        )

    def _answers(self, publication: Publication) -> bool:
        """Neither its producer has died, nor the rank at whose node it is decided now."""
        decider, died = self._table.decider(publication), self._presence.died
        return decider is not None and decider not in died and publication.owner not in died

    def no_finish(self, publication: Publication, waiter: Waiter) -> Failure | None:
        """Why a producer's wait can't end well; None while it can."""
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

    def bad_finish(self, rank: int, key: str) -> Exception:
        """A rank finishes what it has not got."""
        if any(rank in publication.finished for publication in self._table.of_key(key)):
            return ProtocolError(f"{self._presence.at(key)}: rank {rank} has finished it already")

        return ProtocolError(f"{self._presence.at(key)}: rank {rank} finishes what it has not got; call dest_get first")

    def orphaned(self, rank: int, key: str) -> Exception:
        """A rank finishes what reset() has taken."""
        return AbortedError(f"{self._presence.at(key)}: the borrow of rank {rank} ended when the store was reset")

    def bad_wait(self, rank: int, key: str) -> Exception:
        """A rank waits for the consumers of what it has not set."""
        publication = self._table.in_use(key)
        if publication is None:
            return ProtocolError(
                f"{self._presence.at(key)}: rank {rank} waits for a key that is not set; call src_set first"
            )

        return ProtocolError(
            f"{self._presence.at(key)}: rank {rank} waits for its consumers, but rank {publication.owner} set it; "
            f"only the producer waits"
        )

    def in_use(self, rank: int, live: Publication) -> str:
        """A rank sets a key that is live."""
        return (
            f"{self._presence.at(live.key)}: rank {rank} can't set it: it is live, set by rank {live.owner}, which has "
            f"to call src_wait_until_get_finished({live.key!r}) first"
        )

    def overruled(self, publication: Publication, by: int) -> Failure:
        """Another rank has set the key too, and that one counts."""
        at, rank = self._presence.at(publication.key), publication.owner
        text = f"{at}: rank {rank} and rank {by} set it at the same time, and that of rank {by} counts"
        return lambda: KeyInUseError(text)

    def missed(self, publication: Publication, other: int, ranks: Collection[int]) -> Failure:
        """Another rank has set the key too, and some have got that one."""
        at, rank = self._presence.at(publication.key), publication.owner
        text = f"{at}: rank {rank} and rank {other} set it at the same time, and {rank_list(ranks)} got that of {other}"
        return lambda: KeyInUseError(text)

    def late_get(self, rank: int, key: str, timeout: float) -> str:
        """No share has come in time."""
        head = f"{self._presence.at(key)}: rank {rank} waited {seconds(timeout)} in dest_get, and "
        publication = self._table.in_use(key)
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

    def timed_out(self, key: str) -> Callable[[Waiter], Failure | None]:
        """The failure of a wait that is :class:`Late`, once the answer is a refusal."""

        def failure_of(waiter: Waiter) -> Failure | None:
            late = waiter.result
            if not isinstance(late, Late):
                return None

            return lambda: StoreTimeoutError(self.late_get(waiter.rank, key, late))

        return failure_of

    def late_finish(self, rank: int, publication: Publication, timeout: float) -> str:
        """Not all consumers have finished in time."""
        head = (
            f"{self._presence.at(publication.key)}: rank {rank} waited {seconds(timeout)} for "
            f"{count(publication.get_count, 'consumer')}: {len(publication.finished)} finished"
        )
        if publication.borrowers:
            head += f", {rank_list(publication.borrowers)} got a share and did not finish"

        left = publication.get_count - len(publication.takers)
        if left:
            others = set(range(self._presence.world_size)) - publication.takers
            head += f", {left} did not come or did not finish (of {rank_list(others)})"

        return head
