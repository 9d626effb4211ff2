"""Why a call can't end well: who has left, given up, or does not go on. Everything here is called under the mutex."""

from __future__ import annotations

from dtorch_core import AbortedError
from dtorch_core._text import rank_list, seconds
from dtorch_core.presence import Failure
from dtorch_file_store.calls import Call
from dtorch_file_store.node import Node


class CallEnds:
    """What the ranks of one opening have come to."""

    def __init__(self, node: Node) -> None:
        self._node, self._presence = node, node.presence
        self.retired: str | None = None
        """A rank gave up on a call, and why: nothing can be begun any more."""

    def begins_none(self, rank: int, what: str) -> Failure | None:
        """Why nothing can be begun any more; None while it can."""
        return self._presence.ended(rank, what) or self._gave_up(rank, what)

    def stuck(self, call: Call, rank: int) -> Failure | None:
        """Why those who have not come can't come any more, or those who have can't go on."""
        if call.complete and (call.running or not call.halted(call.awaits)):
            return None

        what = call.what(rank)
        if rank in self._presence.closed:
            reason = f"{self._presence.me(rank)}, {what}: it was closed"
            return lambda: AbortedError(reason)

        if call.complete:
            return self._presence.over(rank, what) or self._presence.lacks(rank, self._halted(call), what)

        return self._presence.lacks(rank, call.missing(), what)

    def hopeless(self, call: Call, rank: int) -> Failure | None:
        """Why ``rank`` need not begin to wait for it."""
        if call.complete:
            return self.stuck(call, rank)

        what = call.what(rank)
        return self.stuck(call, rank) or self._presence.over(rank, what) or self._gave_up(rank, what)

    def late(self, call: Call, timeout: float) -> str:
        """Who has not come, or not gone on, in so many seconds."""
        if not call.complete:
            return f"{rank_list(call.missing())} had not come after {seconds(timeout)}"

        return f"{rank_list(self._halted(call))} had come, and did not go on within {seconds(timeout)}"

    def _halted(self, call: Call) -> list[int]:
        nodes = call.halted(call.awaits)
        return [rank for rank, home in enumerate(self._node.homes) if home in nodes]

    def _gave_up(self, rank: int, what: str) -> Failure | None:
        if self.retired is None:
            return None

        reason = f"{self._presence.me(rank)}, {what}: {self.retired}"
        return lambda: AbortedError(reason)
