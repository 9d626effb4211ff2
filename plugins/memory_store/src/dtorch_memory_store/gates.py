"""Gates: a barrier, and the one that reset() waits at. Each opens when all ranks stand before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from dtorch_core._text import rank_list
from dtorch_core.errors import AbortedError, ProtocolError, StoreTimeoutError
from dtorch_core.presence import Failure, Presence, not_all_came, raise_if
from dtorch_memory_store.waiting import Owed, Waiter, fail, wake_all


class Gate:
    """Lets all through once all are here; a rank that gives up can come back."""

    def __init__(self, name: str, presence: Presence, owed: Owed, elsewhere: Collection[int] = ()) -> None:
        self.name = name
        self._presence = presence
        self._owed = owed
        self._elsewhere = elsewhere
        self.here: dict[int, Waiter] = {}
        """The ranks that stand here. Changed in place: others look at it."""
        self._gave_up: set[int] = set()
        """Those that have stood here, and stepped back, since it has last opened."""

    def pass_through(self, rank: int, timeout: float, opening: Callable[[], None], coming: Callable[[], None]) -> None:
        """Wait for every rank. Takes the mutex.

        :param opening: called once by the last to come, under the mutex, before the gate opens.
        :param coming: called by the others, under the mutex. Both may fail waits.
        """
        presence, deadline = self._presence, time.monotonic() + timeout
        waiter = Waiter(rank)
        late = ""
        try:
            with presence.mutex:
                presence.check_open(rank)
                if rank in self.here:
                    raise ProtocolError(f"{presence.me(rank)}: another thread of this rank is in {self.name}() already")

                self.here[rank] = waiter
                self._gave_up.discard(rank)
                if not self._missing():
                    opening()
                    self._open()
                else:
                    failure = self._why_shut(rank)
                    if failure is not None:
                        del self.here[rank]
                        raise failure()

                    coming()

            wake_all(self._owed)
            if not waiter.done:
                waiter.sleep(deadline - time.monotonic())

            if not waiter.done:
                with presence.mutex:
                    late = self._step_back(waiter, timeout)
        except BaseException:  # also Ctrl-C, amid the opening maybe
            with presence.mutex:
                self._mend()
                self._step_back(waiter, timeout)

            wake_all(self._owed)
            raise

        if not waiter.done:
            raise_if(waiter.error)
            raise StoreTimeoutError(f"{presence.me(rank)}, {self.name}(): {late}")

    def give_up(self) -> None:
        """Fail the waits that can't end well any more. Under the mutex."""
        self.end(lambda waiter: self._why_shut(waiter.rank))

    def end(self, failure_of: Callable[[Waiter], Failure | None]) -> None:
        """Fail the waits for which there is a failure. Under the mutex."""
        self._mend()
        fail(self.here.values(), failure_of, self._owed)
        for waiter in list(self.here.values()):
            if waiter.error is not None:
                # It no longer stands here: its rank can come back before its thread has woken.
                del self.here[waiter.rank]
                self._gave_up.add(waiter.rank)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._presence.world_size) if rank not in self.here]

    def _step_back(self, waiter: Waiter, timeout: float) -> str:
        """A rank stands here no longer, unless all are through. Why it waited in vain."""
        missing = [other for other in self._missing() if other not in self._gave_up]
        late = not_all_came(missing, self._gave_up, timeout)
        if self.here.get(waiter.rank) is waiter:
            del self.here[waiter.rank]
            self._gave_up.add(waiter.rank)

        return late

    def _open(self) -> None:
        for waiter in self.here.values():
            waiter.done = True
            self._owed[waiter] = None

        self.here.clear()
        self._gave_up.clear()

    def _mend(self) -> None:
        """Go on with the opening, if its thread was interrupted amid it."""
        if any(waiter.done for waiter in self.here.values()):
            self._open()

    def _why_shut(self, rank: int) -> Failure | None:
        what, missing = f"{self.name}()", self._missing()
        failure = self._presence.lacks(rank, missing, what)
        elsewhere = [other for other in missing if other in self._elsewhere]
        if failure is None and elsewhere:
            text = f"{self._presence.me(rank)}, {what}: {rank_list(elsewhere)} called reset() instead"
            return lambda: AbortedError(text)

        return failure
