"""Stores whose ranks do not wait for each other as they should: timeouts, barriers and resets."""

import contextlib
import threading

from dtorch_memory_store.store import MemoryTensorStore

import dtorch_core
from dtorch_core import StoreTimeoutError

from .base import HANG, PATIENCE, wrong


@wrong("test_barrier_lets_nobody_through_early")
class LetsThroughEarly(MemoryTensorStore):
    def barrier(self, *, timeout=None):
        pass


@wrong("test_timeout_ends_the_wait_and_says_who_has_not_come[get-to the call]")
class IgnoresItsTimeout(MemoryTensorStore):
    def dest_get(self, key, *, stream=None, timeout=None):
        return super().dest_get(key, stream=stream)


@wrong("test_timeout_of_zero_takes_what_is_there")
class LooksForAWhile(MemoryTensorStore):
    """Long enough to hold a program up that looks often, and shorter than what the kit takes for a wait."""

    def _seconds(self, timeout):
        return super()._seconds(0.15 if timeout == 0 else timeout)


class _TakesZeroForNone(MemoryTensorStore):
    def _seconds(self, timeout):
        return super()._seconds(timeout or None)


@wrong("test_timeout_of_zero_takes_what_is_there")
class WaitsWhereItShouldLook(_TakesZeroForNone):
    pass


@wrong("test_timeout_of_zero_does_not_wait_for_other_ranks[barrier]")
class WaitsForOthersAtTheBarrier(_TakesZeroForNone):
    pass


@wrong("test_timeout_of_zero_does_not_wait_for_other_ranks[reset]")
class WaitsForOthersInReset(_TakesZeroForNone):
    pass


class _CountsWhoGaveUp(MemoryTensorStore):
    """A rank that came to a gate once has come, whether or not it is still there."""

    def _stay(self, gate):
        stay = type("Stays", (dict,), {"__delitem__": lambda self, rank: None})
        with self._session.presence.mutex:
            if type(gate.here) is dict:
                gate.here = stay(gate.here)

    def barrier(self, *, timeout=None):
        self._stay(self._session._barrier)
        super().barrier(timeout=timeout)

    def reset(self, *, timeout=None):
        self._stay(self._session._reset)
        super().reset(timeout=timeout)


@wrong("test_collective_does_not_count_a_rank_that_gave_up[barrier]")
class CountsWhoGaveUpABarrier(_CountsWhoGaveUp):
    pass


@wrong("test_collective_does_not_count_a_rank_that_gave_up[reset]")
class CountsWhoGaveUpAReset(_CountsWhoGaveUp):
    pass


@wrong("test_timeout_ends_the_wait_and_says_who_has_not_come[barrier-to the call]")
class NamesNobody(MemoryTensorStore):
    def barrier(self, *, timeout=None):
        try:
            super().barrier(timeout=timeout)
        except StoreTimeoutError:
            raise StoreTimeoutError("too late") from None


@wrong("test_get_can_be_retried_after_a_timeout")
class LosesTheShareOfALateConsumer(MemoryTensorStore):
    """The wait that was given up goes on, and takes what comes."""

    def dest_get(self, key, *, stream=None, timeout=None):
        try:
            return super().dest_get(key, stream=stream, timeout=timeout)
        except StoreTimeoutError:
            threading.Thread(target=self._take, args=(key,), daemon=True).start()
            raise

    def _take(self, key):
        with contextlib.suppress(dtorch_core.DtorchError):
            super().dest_get(key, timeout=PATIENCE)


@wrong("test_reset_drops_every_key")
class DropsNothing(MemoryTensorStore):
    def reset(self, *, timeout=None):
        self.barrier(timeout=timeout)


@wrong("test_reset_is_collective")
class ResetsAlone(MemoryTensorStore):
    def reset(self, *, timeout=None):
        with self._session.presence.mutex:
            self._session.keys._keys.clear()


@wrong("test_reset_wakes_pending_waits[get]")
class HangsInReset(MemoryTensorStore):
    def reset(self, *, timeout=None):
        threading.Event().wait(HANG)
