"""Stores whose consumers get what they should not, or as often, or never."""

import threading

from dtorch_memory_store.store import MemoryTensorStore

from dtorch_core import StoreTimeoutError

from .base import wrong


@wrong("test_wait_lasts_until_every_consumer_has_finished")
class FinishesWithTheGet(MemoryTensorStore):
    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        super().dest_finish_get(key)
        return got

    def dest_finish_get(self, key, **kw):
        pass


@wrong("test_writable_reaches_the_producer_from_every_consumer")
class LosesUpdates(MemoryTensorStore):
    def dest_get(self, key, **kw):
        return super().dest_get(key, **kw).clone()


@wrong("test_memory_from_empty_is_not_copied")
class CopiesWhatItCallsZeroCopy(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor.clone(), get_count, **kw)


@wrong("test_borrowed_tensor_is_each_consumers_own_object")
class HandsOutOneObject(MemoryTensorStore):
    handed = {}

    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        return self.handed.setdefault((self._token, key), got)


@wrong("test_rank_gets_each_generation_once")
class GivesARankTwoShares(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        self._before = {}

    def dest_get(self, key, **kw):
        if key in self._before:
            return self._before.pop(key)

        self._before[key] = super().dest_get(key, **kw)
        return self._before[key]


@wrong("test_get_count_is_how_many_get_it")
class GivesEverybodyAShare(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor, self.world_size, **kw)


@wrong("test_get_count_above_the_number_of_ranks_is_an_error")
class TakesFewerConsumersThanAsked(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor, min(get_count, self.world_size), **kw)


@wrong("test_consumers_may_come_first")
class NeverWakesAConsumer(MemoryTensorStore):
    def dest_get(self, key, *, stream=None, timeout=None):
        try:
            return super().dest_get(key, stream=stream, timeout=0)
        except StoreTimeoutError:
            threading.Event().wait(self.timeout if timeout is None else timeout)
            raise


@wrong("test_get_count_below_one_is_an_error")
class TakesAnyCount(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor, max(1, int(get_count or 1)), **kw)
