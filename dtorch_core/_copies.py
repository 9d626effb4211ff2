"""Copies between tensors of one dtype, also of those that torch has only the name of.

Torch makes them where it can. What it can't copy (whole numbers of fewer than 8 bits; some conjugate and negative views
of half-precision complex numbers) it refuses before it writes anything: only then is another way taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: what is copied in place of it."""


def copy_into(target: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
    """``target.copy_(source)``; they have one dtype where torch can't copy that."""
    try:
        return target.copy_(source, non_blocking=non_blocking)
    except NotImplementedError:
        return _by_another_way(target, source)


def cloned(tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """``tensor.clone()``; contiguous where torch has no way to make it."""
    try:
        return tensor.clone(memory_format=memory_format)
    except NotImplementedError:
        return _by_another_way(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), tensor)


def plain(tensor: Tensor) -> Tensor:
    """The same values, contiguous, without bits that say how to read them; the tensor itself where it is that."""
    try:
        return tensor.resolve_conj().resolve_neg().contiguous()
    except NotImplementedError:
        return cloned(tensor, torch.contiguous_format)


def bare(tensor: Tensor) -> Tensor:
    """Its memory as it lies, without bits that say how to read it; the tensor itself where it has none."""
    if not tensor.is_conj() and not tensor.is_neg():
        return tensor

    memory = tensor.detach()
    memory = memory.conj() if memory.is_conj() else memory
    return torch._neg_view(memory) if memory.is_neg() else memory


def _by_another_way(target: Tensor, source: Tensor) -> Tensor:
    if source.dtype != target.dtype:
        raise NotImplementedError(f"{source.dtype} can't be converted to {target.dtype}")

    if not source.is_complex():
        carrier = _CARRIERS[source.element_size()]
        target.view(carrier).copy_(source.view(carrier))
        return target

    # The bits are of views. What the target's say of its memory can as well be said of the source.
    conjugate, negative = source.is_conj() != target.is_conj(), source.is_neg() != target.is_neg()
    taken = torch.view_as_real(bare(target)).copy_(torch.view_as_real(bare(source)))
    if negative:
        taken.neg_()

    if conjugate:
        taken[..., 1].neg_()

    return target
