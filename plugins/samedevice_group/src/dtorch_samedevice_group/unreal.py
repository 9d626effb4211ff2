"""Tensors without values, fake ones and those on meta: programs work out shapes and memory with them.

As over Gloo, a call of such tensors alone is over when it returns, and exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dtorch_samedevice_group.work import Waited


def is_unreal(tensor: Tensor) -> bool:
    """It has a shape, and no values."""
    if isinstance(tensor, FakeTensor):
        return True

    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.is_meta


def are_unreal(given: Iterable[Any]) -> bool:
    """There are tensors among what a call is given, in its lists too, and none of them has values."""
    found = [is_unreal(tensor) for tensor in tensors_in(given)]
    return bool(found) and all(found)


class UnrealWork(Waited):
    """It is done."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__(outputs, 0)

    def is_completed(self) -> bool:
        return True

    def _end(self, timeout: float) -> None:
        return

    def _devices(self) -> list[torch.device]:
        return []  # a fake tensor may be on a GPU that is not here


def tensors_in(given: Iterable[Any]) -> Iterator[Tensor]:
    """Of what a call is given, in its lists too."""
    for each in given:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors_in(each)
