"""Stores that order CUDA streams wrongly, or their memory."""

import torch
from dtorch_memory_store.store import MemoryTensorStore

from .base import wrong
from .tensors import KeepsEveryTensor


@wrong("test_cuda_value_is_ordered_after_the_producers_work[stream=]")
class ForgetsTheProducersWork(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, *, stream=None, **kw):
        super().src_set(key, tensor, get_count, stream=torch.cuda.Stream(), **kw)


@wrong("test_cuda_tensor_may_be_rewritten_in_place_after_the_wait[stream=]")
class ForgetsTheConsumersWork(MemoryTensorStore):
    def dest_finish_get(self, key, *, stream=None):
        super().dest_finish_get(key, stream=torch.cuda.Stream())


@wrong("test_cuda_value_is_ordered_after_the_producers_work[current stream]")
class OrdersTheDefaultStream(MemoryTensorStore):
    def dest_get(self, key, *, stream=None, timeout=None):
        return super().dest_get(key, stream=stream or torch.cuda.default_stream(), timeout=timeout)


@wrong("test_cuda_value_is_ordered_after_the_producers_work[stream=]")
class WaitsOnTheHost(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        torch.cuda.synchronize()
        super().src_set(key, tensor, get_count, **kw)


@wrong("test_cuda_memory_is_kept_while_a_stream_still_reads_it")
class FreesUnderTheReader(MemoryTensorStore):
    """The reader's stream is ordered, but the allocator is told of another one."""

    def dest_get(self, key, *, stream=None, timeout=None):
        other = torch.cuda.Stream()
        got = super().dest_get(key, stream=other, timeout=timeout)
        (stream or torch.cuda.current_stream()).wait_stream(other)
        return got


@wrong("test_cuda_memory_is_given_back")
class KeepsGpuMemory(KeepsEveryTensor):
    pass


@wrong("test_cuda_copy_to_the_cpu_waits_for_its_own_copy_only")
class CopiesBehindTheCallersWork(MemoryTensorStore):
    def dest_get_to_device(self, key, device, *, stream=None, timeout=None):
        copy = self.dest_get(key, stream=stream, timeout=timeout).to(device, copy=True)
        self.dest_finish_get(key, stream=stream)
        return copy


@wrong("test_cuda_copy_to_the_same_device_is_owned[cuda]")
class TakesTheDeviceForReached(MemoryTensorStore):
    def dest_get_to_device(self, key, device, *, stream=None, timeout=None):
        with self.borrow(key) as got:
            return got.to(device)


@wrong("test_cuda_hint_moves_a_cpu_tensor_on_the_producers_side")
class TakesNoHint(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, *, dest_device=None, **kw):
        super().src_set(key, tensor, get_count, **kw)
