"""Tensors in the place of others, for a group that reads memory as if it were contiguous and knows few dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtorch_core._copies import copy_into, plain

CARRIED = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""The dtypes that every c10d group takes. Values of others travel as bytes."""


class AsTheyAre:
    """For a group that takes any layout and any dtype."""

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    outputs = inputs

    def both(self, tensor: Tensor) -> Tensor:
        return tensor


class StandIns:
    """Contiguous tensors in the place of others, and what puts their values to where they belong."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        """To be called once the collective is done, in this order."""
        self.written: list[Tensor] = []
        """What the steps write."""
        self.cuda = False

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.cuda = self.cuda or any(tensor.is_cuda for tensor in tensors)
        return [as_carried(plain(tensor)) for tensor in tensors]

    def outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [as_carried(self._instead(tensor)) for tensor in tensors]

    def both(self, tensor: Tensor) -> Tensor:
        """For one that is read and written."""
        twin = self._instead(tensor)
        return as_carried(twin if twin is tensor else copy_into(twin, tensor))

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """One flat tensor for several that are written."""
        like = outputs[0]
        whole = torch.empty(sum(tensor.numel() for tensor in outputs), dtype=like.dtype, device=like.device)
        self.cuda = self.cuda or whole.is_cuda
        parts = whole.split([tensor.numel() for tensor in outputs])
        for tensor, part in zip(outputs, parts, strict=True):
            self.afterwards(tensor, lambda tensor=tensor, part=part: copy_into(tensor, part.view(tensor.shape)))  # type: ignore[misc]

        return as_carried(whole)

    def afterwards(self, target: Tensor, step: Callable[[], object]) -> None:
        """``step`` writes ``target``."""
        self.cuda = self.cuda or target.is_cuda
        self.steps.append(step)
        self.written.append(target)

    def _instead(self, tensor: Tensor) -> Tensor:
        self.cuda = self.cuda or tensor.is_cuda
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor

        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.afterwards(tensor, lambda: copy_into(tensor, twin))
        return twin


AS_THEY_ARE = AsTheyAre()
Layouts = AsTheyAre | StandIns


def as_carried(tensor: Tensor) -> Tensor:
    """The same memory of a contiguous tensor, as bytes where its dtype is carried by few."""
    return tensor if tensor.dtype in CARRIED else tensor.view(-1).view(torch.uint8)


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors of one size that lie one behind the other, in their order; None if they do not."""
    first = tensors[0]
    step, numel = first.nbytes, first.numel()
    for number, tensor in enumerate(tensors):
        place = first.data_ptr() + number * step
        if tensor.numel() != numel or not tensor.is_contiguous() or tensor.data_ptr() != place:
            return None

    if first.storage_offset() + numel * len(tensors) > first.untyped_storage().nbytes() // first.element_size():
        return None  # neighbours by chance, in memory of their own

    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
        return None

    return first.as_strided((numel * len(tensors),), (1,))
