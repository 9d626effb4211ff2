"""Stores that end wrongly: by a goodbye, a death or an abort."""

import threading

from dtorch_memory_store.store import MemoryTensorStore

from dtorch_core import ProtocolError

from .base import HANG, wrong


@wrong("test_goodbye_of_the_last_other_rank_ends_waits")
class WakesNobodyOnClose(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        self._dropped.detach()

    def close(self):
        pass


@wrong("test_close_may_be_repeated_and_ends_the_handle")
class ClosesOnce(MemoryTensorStore):
    def close(self):
        if self.rank in self._session.presence.closed:
            raise ProtocolError("closed twice")

        super().close()


@wrong("test_goodbye_leaves_waits_that_another_rank_can_satisfy")
class TakesAGoodbyeForADeath(MemoryTensorStore):
    def close(self):
        self.abort("it left", died=True)
        super().close()


@wrong("test_goodbye_after_finish_is_no_loss")
class TakesItsKeysAlong(MemoryTensorStore):
    def close(self):
        with self._session.presence.mutex:
            for key in [key for key, item in self._session.keys._keys.items() if item.owner == self.rank]:
                del self._session.keys._keys[key]

        super().close()


@wrong("test_reference_is_dropped[by close]")
class NeverEndsAnOpening(MemoryTensorStore):
    """What is still published when all have closed stays so, where nobody can come to it."""

    kept = []

    def close(self):
        self.kept += list(self._session.keys._keys.values())
        super().close()


@wrong("test_death_ends_every_wait_of_every_survivor[get]")
class TellsNobodyOfADeath(MemoryTensorStore):
    def abort(self, reason, *, died=False):
        pass


@wrong("test_death_ends_every_wait_of_every_survivor")
class TakesADeathForAGoodbye(MemoryTensorStore):
    def abort(self, reason, *, died=False):
        self.close()


@wrong("test_abort_ends_every_wait")
class HangsInAbort(MemoryTensorStore):
    def abort(self, reason, *, died=False):
        threading.Event().wait(HANG)
