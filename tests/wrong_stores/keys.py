"""Stores that mix up keys, or mistakes with them."""

import contextlib
import threading

from dtorch_memory_store.store import MemoryTensorStore

from dtorch_core import KeyInUseError, ProtocolError

from .base import wrong


@wrong("test_many_keys_are_in_flight_at_once")
class HasRoomForFewKeys(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(str(hash(key) % 51), tensor, get_count, **kw)

    def dest_get(self, key, **kw):
        return super().dest_get(str(hash(key) % 51), **kw)

    def dest_finish_get(self, key, **kw):
        super().dest_finish_get(str(hash(key) % 51), **kw)

    def src_wait_until_get_finished(self, key, **kw):
        super().src_wait_until_get_finished(str(hash(key) % 51), **kw)


@wrong("test_key_is_free_after_the_wait")
class NeverFreesAKey(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        self._used = set()

    def src_set(self, key, tensor, get_count, **kw):
        if key in self._used:
            raise KeyInUseError(key)

        super().src_set(key, tensor, get_count, **kw)
        self._used.add(key)


@wrong("test_live_key_refuses_a_second_set")
class OverlooksALiveKey(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        with contextlib.suppress(KeyInUseError):
            super().src_set(key, tensor, get_count, **kw)


@wrong("test_finish_without_a_get_is_an_error")
class SwallowsAnError(MemoryTensorStore):
    def dest_finish_get(self, key, **kw):
        with contextlib.suppress(ProtocolError):
            super().dest_finish_get(key, **kw)


@wrong("test_wait_for_a_key_never_set_is_an_error")
class WaitsForNothing(MemoryTensorStore):
    def src_wait_until_get_finished(self, key, **kw):
        with contextlib.suppress(ProtocolError):
            super().src_wait_until_get_finished(key, **kw)


@wrong("test_stores_of_other_names_share_no_keys")
class HasOneSpaceForAllNames(MemoryTensorStore):
    """Keys are shared between the stores of one run."""

    first = {}

    def __init__(self, ctx):
        super().__init__(ctx)
        run = threading.current_thread().ident
        self._session = self.first.setdefault(run, self._session)
