"""What a rank brings to joint work, as the other processes get to know it: a note, shapes, and small values.

Programs make the same few calls again and again, so what follows from shapes alone is worked out once.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtorch_core._copies import plain
from dtorch_core._shapes import Shape
from dtorch_core.joint import Offer
from dtorch_file_store.tensors import compact
from dtorch_file_store.values import to_bytes
from dtorch_file_store.wire import INLINE_BYTES

_ALIGNED = 16
"""Tensors begin at multiples of this many bytes of a body: no dtype is larger."""

_MOST = 1000
"""Forms that are remembered."""


class Form:
    """The shapes and dtypes of a rank's tensors, and where their values lie in a message."""

    __slots__ = ("counts", "offsets", "padding", "shapes", "small", "text")

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = shapes
        self.text = json.dumps([shape.to_json() for shape in shapes])
        """How it travels."""
        self.counts = [math.prod(shape.sizes) for shape in shapes]
        nbytes = [count * shape.dtype.itemsize for count, shape in zip(self.counts, shapes, strict=True)]
        self.padding = [bytes(-each % _ALIGNED) for each in nbytes]
        *self.offsets, end = accumulate(
            (each + len(pad) for each, pad in zip(nbytes, self.padding, strict=True)), initial=0
        )
        self.small = end <= INLINE_BYTES
        """The values are sent along."""


_by_tensors: dict[tuple[object, ...], Form] = {}
_by_text: dict[str, Form] = {}


class Brought(NamedTuple):
    """One rank's offer, here or in another process."""

    note: str
    form: Form
    tensors: Sequence[Tensor] = ()
    """Of a rank of this process."""
    body: bytes = b""
    """Of a rank of another process: the values that were sent along."""
    tickets: Sequence[Any] = ()
    """On CUDA, of a rank of another process: how to map its tensors."""
    ready: Any = None
    """On CUDA: where the rank's stream was. An event here, a mark of another process."""


def form_of(tensors: Sequence[Tensor]) -> Form:
    """The form of some tensors."""
    key = tuple([part for tensor in tensors for part in (tensor.dtype, tensor.shape)])
    form = _by_tensors.get(key)
    if form is None:
        if len(_by_tensors) >= _MOST:
            _by_tensors.clear()

        form = _by_tensors[key] = Form([Shape.of(tensor) for tensor in tensors])

    return form


def form_from(text: str) -> Form:
    """The form that another process describes."""
    form = _by_text.get(text)
    if form is None:
        if len(_by_text) >= _MOST:
            _by_text.clear()

        form = _by_text[text] = Form([Shape.from_json(shape) for shape in json.loads(text)])

    return form


def own(offer: Offer) -> Brought:
    """An offer of CPU tensors of this process."""
    form = form_of(offer.tensors)
    return Brought(offer.note, form, offer.tensors)


def pack(brought: Brought) -> tuple[list[Any], bytes]:
    """What another process needs to know of it: plain values, and a body."""
    form = brought.form
    if not form.small:
        return [brought.note, form.text], b""

    if len(brought.tensors) == 1:
        return [brought.note, form.text], _bytes_of(brought.tensors[0])

    parts: list[bytes] = []
    for tensor, padding in zip(brought.tensors, form.padding, strict=True):
        parts += _bytes_of(tensor), padding

    return [brought.note, form.text], b"".join(parts)


def _bytes_of(tensor: Tensor) -> bytes:
    """Its values, one after the other."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)

    whole = plain(tensor.detach())
    return to_bytes(whole, compact(whole))


def unpack(home: int, fields: Sequence[Any], body: bytes) -> Brought:
    """What a node has packed. Makes no tensor: see :func:`values`."""
    note, text, *device = fields
    form = form_from(text)
    if device:
        return Brought(note, form, tickets=device[0], ready=(home, device[1]))

    return Brought(note, form, body=body)


def values(brought: Brought) -> Sequence[Tensor]:
    """The tensors of a rank whose values are small: its own here, copies of another process's."""
    if brought.tensors:
        return brought.tensors

    form, memory, tensors = brought.form, bytearray(brought.body), []
    for shape, count, offset in zip(form.shapes, form.counts, form.offsets, strict=True):
        if count:
            flat = torch.frombuffer(memory, dtype=shape.dtype, count=count, offset=offset)
            tensors.append(flat if len(shape.sizes) == 1 else flat.view(shape.sizes))
        else:
            tensors.append(torch.empty(shape.sizes, dtype=shape.dtype))

    return tensors
