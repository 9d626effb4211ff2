"""A CPU tensor as bytes: how it is laid out in shared memory, written once, and read where it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dtorch_core._copies import copy_into
from dtorch_core.errors import UnsupportedTensorError

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.qint", "torch.quint"))
}
"""By name: a name from another process is looked up here, and nowhere else. Of quantized ones bytes are not enough."""

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_COPIED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
}
"""What every torch can copy."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: what is copied in place of the other dtypes, of which torch may have only the name."""


class Layout(NamedTuple):
    """Where a tensor's elements lie in memory that begins with the first of them."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    nbytes: int
    """From the first element's first byte to the last one's last."""

    @classmethod
    def of_view(cls, tensor: Tensor) -> Layout:
        """How it lies in its own memory. Not of conjugate and negative views: their memory has other values."""
        return _as_it_lies(tensor.dtype, tensor.shape, tensor.stride())

    def to_json(self) -> tuple[Any, ...]:
        """Plain tuples, strings and numbers."""
        return tuple(self)

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Layout:
        """What :meth:`to_json` gave, perhaps in another process."""
        dtype, shape, stride, nbytes = values
        return cls(dtype, tuple(shape), tuple(stride), nbytes)


def compact(tensor: Tensor) -> Layout:
    """How to store a tensor: the elements that its view addresses, each of them once.

    Expanded dimensions stay expanded, and dense ones in the order that they have. What has gaps is contiguous.
    """
    return _compact(tensor.dtype, tensor.shape, tensor.stride())


# Programs exchange tensors of a few kinds again and again.


@lru_cache(4096)
def _as_it_lies(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Layout:
    return Layout(_NAMES[dtype], tuple(shape), stride, _extent(shape, stride) * dtype.itemsize)


@lru_cache(4096)
def _compact(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Layout:
    distinct = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    if _extent(shape, stride) > math.prod(distinct):
        stride = _contiguous(distinct, stride)

    return _as_it_lies(dtype, shape, stride)


def write(tensor: Tensor, layout: Layout, into: Tensor) -> None:
    """Copy a tensor to memory, once; conjugate and negative views arrive with their values.

    :param layout: from :func:`compact`.
    :param into: ``uint8``, at least ``layout.nbytes`` long.
    """
    if not layout.nbytes:
        return

    if tensor.dtype in _COPIED and tensor.is_contiguous():  # what most are, by the shortest way
        flat = tensor.detach().view(-1)
        copy_into(into[: layout.nbytes].view(flat.dtype), flat)
    else:
        _copy(_elements(tensor, layout), _elements(read(layout, into), layout))


def read(layout: Layout, memory: Tensor) -> Tensor:
    """The tensor that lies in ``memory``, without a copy.

    :param memory: ``uint8``, with the tensor's first byte as its first.
    :raises UnsupportedTensorError: if this torch has no such dtype.
    """
    dtype = _DTYPES.get(layout.dtype) or _unknown(layout)
    if len(memory) != layout.nbytes:
        memory = memory[: layout.nbytes]

    flat = memory.view(dtype)
    return flat if layout.stride == (1,) else flat.as_strided(layout.shape, layout.stride)


def over(layout: Layout, buffer: bytearray) -> Tensor:
    """The tensor whose bytes are those of ``buffer``, which it keeps: what :func:`read` gives, by a shorter way.

    :raises UnsupportedTensorError: if this torch has no such dtype.
    """
    if not layout.nbytes:
        return read(layout, torch.empty(0, dtype=torch.uint8, device="cpu"))

    flat = torch.frombuffer(buffer, dtype=_DTYPES.get(layout.dtype) or _unknown(layout))
    return flat if layout.stride == (1,) else flat.as_strided(layout.shape, layout.stride)


def _unknown(layout: Layout) -> NoReturn:
    raise UnsupportedTensorError(
        f"a tensor of dtype {layout.dtype} came from another process, and torch {torch.__version__} has none of this "
        f"name: use one version of torch in all processes"
    )


def read_back(layout: Layout, memory: Tensor, tensor: Tensor) -> None:
    """Copy the values that lie in ``memory`` to the tensor that was written there."""
    if layout.nbytes:
        _copy(_elements(read(layout, memory), layout), _elements(tensor, layout))


def _elements(tensor: Tensor, layout: Layout) -> Tensor:
    """A view that is not expanded. (Windows that overlap stay: they are written more than once, with equal values.)"""
    tensor = tensor.detach()
    if 0 in layout.stride:
        for dim, (size, step) in enumerate(zip(layout.shape, layout.stride, strict=True)):
            if step == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)

    return tensor


def _copy(source: Tensor, target: Tensor) -> None:
    if source.dtype not in _COPIED:
        source, target = (each.view(_CARRIERS[each.element_size()]) for each in (source, target))

    copy_into(target, source)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last."""
    extent = 1
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0

        extent += (size - 1) * step

    return extent


def _contiguous(distinct: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for the dimensions that are not expanded."""
    steps, step = [], 1
    for size, old in zip(reversed(distinct), reversed(stride), strict=True):
        steps.append(step if old else 0)
        step *= size

    return tuple(reversed(steps))
