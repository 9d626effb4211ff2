"""Stores that end a borrow or a publication wrongly."""

import contextlib

from dtorch_memory_store.store import MemoryTensorStore

from .base import wrong


@wrong("test_copy_to_a_device_is_owned")
class BorrowsWhereItShouldCopy(MemoryTensorStore):
    def dest_get_to_device(self, key, device, *, stream=None, timeout=None):
        got = self.dest_get(key, stream=stream, timeout=timeout)
        self.dest_finish_get(key, stream=stream)
        return got.to(device)


@wrong("test_copy_that_fails_ends_the_borrow")
class KeepsTheBorrowOfAFailedCopy(MemoryTensorStore):
    def dest_get_to_device(self, key, device, *, stream=None, timeout=None):
        copy = self.dest_get(key, stream=stream, timeout=timeout).to(device, copy=True)
        self.dest_finish_get(key, stream=stream)
        return copy


@wrong("test_publish_does_not_wait_if_its_body_raised")
class WaitsAfterAnError(MemoryTensorStore):
    @contextlib.contextmanager
    def publish(self, key, tensor, get_count, **kw):
        self.src_set(key, tensor, get_count, **kw)
        try:
            yield
        finally:
            self.src_wait_until_get_finished(key)


@wrong("test_borrow_finishes_if_its_body_raised")
class KeepsTheBorrowAfterAnError(MemoryTensorStore):
    @contextlib.contextmanager
    def borrow(self, key, **kw):
        yield self.dest_get(key, **kw)
        self.dest_finish_get(key)
