"""Gates: a barrier, and the one that reset() waits at. Each opens when all ranks stand before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from dtorch_core._text import rank_list
from dtorch_core.errors import AbortedError, ProtocolError, StoreTimeoutError
from dtorch_core.presence import Failure, Presence, not_all_came, raise_if, settle
from dtorch_memory_store.waiting import Waiter, wake


class Gate:
    """Lets all through once all are here; a rank that gives up can come back."""

    def __init__(self, name: str, presence: Presence, elsewhere: Collection[int] = ()) -> None:
        self.name = name
        self._presence = presence
        self._elsewhere = elsewhere
        self.here: dict[int, Waiter] = {}
        """The ranks that stand here. Changed in place: others look at it."""
        self._gave_up: set[int] = set()
        """Those that have stood here, and stepped back, since it has last opened."""

    def pass_through(
        self, rank: int, timeout: float, opening: Callable[[], list[Waiter]], coming: Callable[[], list[Waiter]]
    ) -> None:
        """Wait for every rank. Takes the mutex.

        :param opening: called once by the last to come, under the mutex, before the gate opens.
        :param coming: called by the others, under the mutex. Both return waiters to wake.
        """
        presence, deadline = self._presence, time.monotonic() + timeout
        with presence.mutex:
            presence.check_open(rank)
            if rank in self.here:
                raise ProtocolError(f"{presence.me(rank)}: another thread of this rank is in {self.name}() already")

            waiter = self.here[rank] = Waiter(rank)
            self._gave_up.discard(rank)
            if not self._missing():
                waiter.done = True
                woken = opening() + [other for other in self._open() if other is not waiter]
            else:
                failure = self._why_shut(rank)
                if failure is not None:
                    del self.here[rank]
                    raise failure()

                woken = coming()

        wake(woken)
        if waiter.done:
            return

        try:
            waiter.sleep(deadline - time.monotonic())
        finally:
            with presence.mutex:
                missing = [other for other in self._missing() if other not in self._gave_up]
                late = not_all_came(missing, self._gave_up, timeout)
                if self.here.get(rank) is waiter:
                    del self.here[rank]
                    self._gave_up.add(rank)

        if not waiter.done:
            raise_if(waiter.error)
            raise StoreTimeoutError(f"{presence.me(rank)}, {self.name}(): {late}")

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more: the waiters to wake. Under the mutex."""
        return self.end(lambda waiter: self._why_shut(waiter.rank))

    def end(self, failure_of: Callable[[Waiter], Failure | None]) -> list[Waiter]:
        """Fail the waits for which there is a failure: the waiters to wake. Under the mutex."""
        failed = settle(self.here.values(), failure_of)
        for waiter in failed:
            # It no longer stands here: its rank can come back before its thread has woken.
            del self.here[waiter.rank]
            self._gave_up.add(waiter.rank)

        return failed

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._presence.world_size) if rank not in self.here]

    def _open(self) -> list[Waiter]:
        waiters = list(self.here.values())
        self.here.clear()
        self._gave_up.clear()
        for waiter in waiters:
            waiter.done = True

        return waiters

    def _why_shut(self, rank: int) -> Failure | None:
        what, missing = f"{self.name}()", self._missing()
        failure = self._presence.lacks(rank, missing, what)
        elsewhere = [other for other in missing if other in self._elsewhere]
        if failure is None and elsewhere:
            text = f"{self._presence.me(rank)}, {what}: {rank_list(elsewhere)} called reset() instead"
            return lambda: AbortedError(text)

        return failure
