"""Who of an opening's ranks has left, and how; and what a wait raises because of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dtorch_core._text import rank_list
from dtorch_core.errors import AbortedError, PeerLostError
from dtorch_file_store.waiting import Failure


class Presence:
    """The ranks of one opening, as this node knows them. All of it under the node's mutex."""

    def __init__(self, label: str, pids: Sequence[int]) -> None:
        """
        :param pids: each rank's process.
        """
        self.label = label
        """How messages call the opening: the store, or the group that it is for."""
        self.pids = pids
        self.world_size = len(pids)
        self.closed: set[int] = set()
        self.died: dict[int, str] = {}
        """Ranks that failed, and how."""
        self.aborted: str | None = None
        """Why everything was ended."""
        self.over_for_all = False
        """All that was said before a rank died or aborted has arrived: what is not satisfied now never will be."""

    def me(self, rank: int) -> str:
        """Begins a message about a rank."""
        return f"{self.label}, rank {rank}"

    def at(self, key: str) -> str:
        """Begins a message about a key."""
        return f"{self.label}, key {key!r}"

    def others(self, rank: int) -> set[int]:
        """Every rank but one."""
        return set(range(self.world_size)) - {rank}

    @property
    def complete(self) -> bool:
        """Nobody has left: a quick answer for those who would ask why not."""
        return not self.closed and not self.died and self.aborted is None

    def check_open(self, rank: int) -> None:
        """:raises AbortedError: if the rank has closed its handle."""
        if rank in self.closed:
            raise AbortedError(f"{self.me(rank)}: it is closed; open it anew")

    def over(self, rank: int, what: str) -> Failure | None:
        """Why no wait of any kind can end well; None while it can."""
        return self.ended(rank, what) if self.over_for_all else None

    def ended(self, rank: int, what: str) -> Failure | None:
        """Why nothing can be begun any more; None while it can."""
        # A death first: whoever ends the run because of it aborts the other ranks' handles as well.
        if self.died:
            dead, why = next(iter(self.died.items()))
            text = (
                f"{self.me(rank)}, {what}: rank {dead} (pid {self.pids[dead]}) was lost: {why}; open {self.label} anew"
            )
            return lambda: PeerLostError(text)

        if self.aborted is not None:
            reason = f"{self.me(rank)}, {what}: {self.aborted}"
            return lambda: AbortedError(reason)

        return None

    def lacks(self, rank: int, needed: Iterable[int], what: str) -> Failure | None:
        """Why ``rank`` can't wait for something that every one of ``needed`` has to do; None if it can."""
        gone = [other for other in needed if other in self.closed]
        return self.over(rank, what) or (self.lost(rank, gone, what) if gone else None)

    def lost(self, rank: int, gone: Iterable[int], what: str) -> Failure:
        """The failure of a wait that ranks which closed their handles could have satisfied."""
        ranks = list(gone)
        if any(other in self.died for other in ranks):  # its goodbye came before everybody knew of its death
            ended = self.ended(rank, what)
            assert ended is not None, "a rank has died"
            return ended

        pids = ", ".join(str(pid) for pid in sorted({self.pids[other] for other in ranks}))
        text = (
            f"{self.me(rank)}, {what}: {rank_list(ranks)} (pid {pids}) {'has' if len(ranks) == 1 else 'have'} "
            f"left {self.label} (closed it or returned), so nobody can satisfy this wait any more"
        )
        return lambda: PeerLostError(text)
