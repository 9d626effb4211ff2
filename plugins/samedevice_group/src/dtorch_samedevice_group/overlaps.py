"""Copies the inputs of a call that its own outputs lie across: they would be overwritten before all have read them.

The ranks' outputs are written in any order, block by block, by any rank's thread. An input that is the very memory of
the output that it becomes on its own rank is no danger: nothing else is written there. So programs gather in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from dtorch_core._copies import cloned
from dtorch_core._memory import same_place, span
from dtorch_samedevice_group.blocks import plain


class Roles(NamedTuple):
    """Which of one rank's tensors are written, and which are read."""

    outputs: Sequence[int]
    inputs: Sequence[tuple[int, int | None]]
    """Each with the output that may be its very memory: the one that it becomes, or helps to become, on this rank."""
    piece: int | None = None
    """Which piece of the one whole tensor the other one may be, of a call that is given just these two."""

    def moved(self, by: int) -> Roles:
        """The same among other calls' tensors."""
        inputs = [(number + by, None if own is None else own + by) for number, own in self.inputs]
        return Roles([number + by for number in self.outputs], inputs)


def as_one(roles: Sequence[Roles | None], counts: Sequence[int]) -> Roles:
    """Of calls that are made together, of which each has so many tensors."""
    outputs: list[int] = []
    inputs: list[tuple[int, int | None]] = []
    start = 0
    for each, count in zip(roles, counts, strict=True):
        if each is not None:
            moved = each.moved(start)
            outputs += moved.outputs
            inputs += moved.inputs

        start += count

    return Roles(outputs, inputs)


def harmless(output: Tensor, given: Tensor, piece: int | None) -> bool:
    """A quick look at whole tensors: they are apart, or the smaller one is this piece of the other one."""
    place, other = output.data_ptr(), given.data_ptr()
    first, distance = (output, other - place) if place < other else (given, place - other)
    if distance >= first.nbytes:
        return first.is_contiguous()

    if piece is None or not (plain(output) and plain(given)):
        return False

    part, whole = (given, output) if given.nbytes < output.nbytes else (output, given)
    return part.data_ptr() - whole.data_ptr() == piece * part.nbytes


def guarded(tensors: Sequence[Tensor], roles: Roles) -> list[Tensor]:
    """The tensors, with copies of the inputs that are at risk."""
    safe = list(tensors)
    outputs = [(*_span(tensors[number]), number) for number in roles.outputs]
    if not outputs:
        return safe

    first, last = min([start for start, _, _ in outputs]), max([end for _, end, _ in outputs])
    for number, own in roles.inputs:
        tensor = tensors[number]
        start, end = _span(tensor)
        if end <= first or last <= start:
            continue

        for out_start, out_end, output in outputs:
            if out_start < end and start < out_end and not (output == own and same_place(tensor, tensors[output])):
                safe[number] = cloned(tensor)
                break

    return safe


def meet(tensors: Sequence[Tensor]) -> bool:
    """Two of them, or more, may have memory in common."""
    spans = sorted([_span(tensor) for tensor in tensors if tensor.nbytes])
    return any([start < end for (_, end), (start, _) in pairwise(spans)])


def _span(tensor: Tensor) -> tuple[int, int]:
    # As span, with one call less for most tensors: it is asked of all tensors of a small collective.
    if tensor.is_contiguous():
        start = tensor.data_ptr()
        return start, start + tensor.nbytes

    return span(tensor)
