"""Stores that are not what they declare."""

import time

from dtorch_memory_store.store import MemoryTensorStore

from dtorch_core import Support

from .base import wrong


@wrong("test_probe_says_yes_only_to_what_is_declared", probe=lambda topology: Support.yes(1, "anywhere"))
class PromisesTooMuch(MemoryTensorStore):
    pass


@wrong("test_probe_says_yes_only_to_what_is_declared", probe=lambda topology: Support.no("nowhere"))
class PromisesNothing(MemoryTensorStore):
    pass


@wrong("test_probe_says_yes_only_to_what_is_declared", probe=lambda topology: Support.yes(time.monotonic_ns(), "now"))
class ProbesTheClock(MemoryTensorStore):
    pass


@wrong("test_other_device_is_refused_where_it_is_not_declared", capabilities={"cpu", "zero_copy"})
class IgnoresAHint(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, *, dest_device=None, **kw):
        super().src_set(key, tensor, get_count, **kw)


@wrong("test_writable_is_refused_or_honoured", capabilities={"cpu"})
class IgnoresWritable(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor.clone(), get_count, **kw)
