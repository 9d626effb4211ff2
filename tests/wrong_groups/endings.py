"""Groups that end wrongly: by a timeout, an abort, a goodbye or a death."""

import threading
import time

import torch
from dtorch_samedevice_group.group import SameDeviceProcessGroup
from dtorch_samedevice_group.work import SendWork

from dtorch_core import StoreTimeoutError

from .base import PATIENCE, EndsWork, Works, wrong


@wrong("test_timeout_names_who_has_not_come_and_who_gave_up[all_reduce]")
class IgnoresTimeouts(Works):
    class work(EndsWork):
        def _end(self, timeout):
            super()._end(60.0)


@wrong("test_timeout_names_who_has_not_come_and_who_gave_up[all_reduce]")
class NamesNobodyWhoIsLate(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except StoreTimeoutError:
                raise StoreTimeoutError("too late") from None


@wrong("test_timeout_names_who_has_not_come_and_who_gave_up[barrier]")
class ForgetsWhoGaveUp(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except StoreTimeoutError:
                self._ticket._joint._retired = None
                raise


@wrong("test_timeout_is_each_ranks_own[barrier]")
class EndsForAllAtTheFirstDeadline(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except StoreTimeoutError as error:
                joint = self._ticket._joint
                with joint.presence.mutex:
                    joint.presence.aborted = str(error)
                    woken = joint.give_up()

                for waiter in woken:
                    waiter.wake()

                raise


@wrong("test_barrier_lets_nobody_through_before_all_have_come[2]")
class HasABarrierThatIsOpen(SameDeviceProcessGroup):
    def barrier(self, *args, **named):
        return SendWork()


@wrong("test_barrier_lets_nobody_through_before_all_have_come[3]")
class HasABarrierForTheFirstRankAlone(SameDeviceProcessGroup):
    """All wait for rank 0, and nobody for the others."""

    def barrier(self, *args, **named):
        if self.rank() == 0:
            for rank in range(1, self.size()):
                self.send([torch.zeros(1)], rank, 99)

            return SendWork()

        self.recv([torch.zeros(1)], 0, 99).wait()
        return SendWork()


@wrong("test_abort_wakes_every_rank_now_and_later[all_to_all_list]")
class HangsOnAbort(SameDeviceProcessGroup):
    def abort(self, reason="", *, died=False):
        pass


@wrong("test_abort_wakes_every_rank_now_and_later[all_gather]")
class AbortsTheLaterCallsOnly(SameDeviceProcessGroup):
    def abort(self, reason="", *, died=False):
        self._store._session.presence.aborted = reason


@wrong("test_close_is_a_goodbye")
class LeavesWithoutAGoodbye(SameDeviceProcessGroup):
    def shutdown(self):
        pass


@wrong("test_rank_that_fails_ends_the_run_at_once[barrier]")
class CallsADeathAnAbort(SameDeviceProcessGroup):
    def __init__(self, ctx):
        super().__init__(ctx)
        store_abort = self._store.abort
        self._store.abort = lambda reason, *, died=False: store_abort(reason)

    def abort(self, reason="", *, died=False):
        self._store.abort(reason)


@wrong("test_close_right_after_the_last_call_disturbs_nobody")
class LeavesAThread(SameDeviceProcessGroup):
    def shutdown(self):
        super().shutdown()
        threading.Thread(target=time.sleep, args=(3 * PATIENCE,), daemon=True).start()
