"""What a rank brings to joint work, as the other processes get to know it: a note, shapes, and small values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtorch_core._shapes import Shape
from dtorch_core.joint import Offer
from dtorch_file_store.tensors import compact
from dtorch_file_store.values import to_bytes
from dtorch_file_store.wire import INLINE_BYTES

_ALIGNED = 16
"""Tensors begin at multiples of this many bytes of a body: no dtype is larger."""


class Brought(NamedTuple):
    """One rank's offer, here or in another process."""

    note: str
    shapes: Sequence[Shape]
    small: bool
    """Its values were sent along."""
    tensors: Sequence[Tensor]
    """Of a rank of this process: its own. Of another: copies of them, if they were sent along, else none."""
    tickets: Sequence[Any] = ()
    """On CUDA, of a rank of another process: how to map its tensors."""
    ready: Any = None
    """On CUDA: where the rank's stream was. An event here, a mark of another process."""


def own(offer: Offer) -> Brought:
    """An offer of this process."""
    small = sum(tensor.nbytes + _ALIGNED for tensor in offer.tensors) <= INLINE_BYTES
    return Brought(offer.note, [Shape.of(tensor) for tensor in offer.tensors], small, offer.tensors)


def pack(brought: Brought) -> tuple[list[Any], bytes]:
    """What another process needs to know of it: plain values, and a body."""
    shapes = [shape.to_json() for shape in brought.shapes]
    if not brought.small:
        return [brought.note, shapes, False], b""

    parts = []
    for tensor in brought.tensors:
        whole = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
        data = to_bytes(whole, compact(whole))
        parts += [data, bytes(-len(data) % _ALIGNED)]

    return [brought.note, shapes, True], b"".join(parts)


def unpack(home: int, fields: Sequence[Any], body: bytes) -> Brought:
    """What a node has packed."""
    note, described, small, *device = fields
    shapes = [Shape.from_json(shape) for shape in described]
    if device:
        return Brought(note, shapes, False, (), tickets=device[0], ready=(home, device[1]))

    if not small:
        return Brought(note, shapes, False, ())

    tensors, at = [], 0
    memory = bytearray(body)
    for shape in shapes:
        count = shape_numel(shape)
        if count:
            tensor = torch.frombuffer(memory, dtype=shape.dtype, count=count, offset=at).view(shape.sizes)
        else:
            tensor = torch.empty(shape.sizes, dtype=shape.dtype)

        tensors.append(tensor)
        nbytes = count * shape.dtype.itemsize
        at += nbytes + -nbytes % _ALIGNED

    return Brought(note, shapes, True, tensors)


def shape_numel(shape: Shape) -> int:
    """How many elements a tensor of this shape has."""
    count = 1
    for size in shape.sizes:
        count *= size

    return count
