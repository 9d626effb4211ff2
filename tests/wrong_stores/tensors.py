"""Stores that change tensors, or keep them."""

import torch
from dtorch_memory_store.store import MemoryTensorStore

from .base import wrong


@wrong("test_dtype_arrives_bit_for_bit")
class Widens(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor.to(torch.int32) if tensor.dtype is torch.uint16 else tensor, get_count, **kw)


@wrong("test_layout_arrives_with_its_values")
class DropsTheConjugateBit(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor.conj() if tensor.is_conj() else tensor, get_count, **kw)


@wrong("test_layout_arrives_with_its_values")
class DropsTheNegativeBit(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, torch._neg_view(tensor) if tensor.is_neg() else tensor, get_count, **kw)


@wrong("test_layout_arrives_with_its_values")
class ForgetsStrides(MemoryTensorStore):
    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        flat = got.as_strided((got.untyped_storage().nbytes() // got.element_size(),), (1,), 0)
        return flat[: got.numel()].reshape(got.shape) if flat.numel() >= got.numel() else got


@wrong("test_borrowed_storage_spans_its_own_bytes_only")
class ShowsMoreThanTheTensor(MemoryTensorStore):
    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        return torch.stack([got, got])[0]


@wrong("test_requires_grad_arrives_detached")
class KeepsTheGraph(MemoryTensorStore):
    def dest_get(self, key, **kw):
        return super().dest_get(key, **kw).requires_grad_()


@wrong("test_what_cannot_be_carried_is_refused_by_name")
class TakesSparseForDense(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
            tensor = tensor.to_dense()

        super().src_set(key, tensor, get_count, **kw)


@wrong("test_reference_is_dropped")
class KeepsEveryTensor(MemoryTensorStore):
    kept = []

    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor, get_count, **kw)
        self.kept.append(tensor)


@wrong("test_consumers_memory_is_given_back")
class KeepsEveryBorrow(MemoryTensorStore):
    kept = []

    def dest_get(self, key, **kw):
        self.kept.append(super().dest_get(key, **kw))
        return self.kept[-1]


@wrong("test_large_value_arrives_whole")
class CutsLargeValues(MemoryTensorStore):
    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        if got.numel() > 1 << 22:
            got = got.clone()
            got.view(-1)[1 << 22 :] = 0

        return got


@wrong("test_empty_of_more_than_there_is_says_so", thorough=True)
class SpeaksInTorchsWords(MemoryTensorStore):
    def empty(self, size, *, dtype, device=None):
        return torch.empty(size, dtype=dtype, device=device or self.device)
