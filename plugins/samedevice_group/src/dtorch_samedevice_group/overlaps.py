"""Copies the inputs of a call that its own outputs lie across: they would be overwritten before all have read them.

The ranks' outputs are written in any order, block by block, by any rank's thread. An input that is the very memory of
the output that it becomes on its own rank is no danger: nothing else is written there. So programs gather in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from dtorch_core._copies import cloned
from dtorch_core._memory import same_place, span


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


Clear = Callable[[Sequence[Tensor]], bool]
"""Sees at once, of tensors like those that it was made for, that none is at risk. False: look closer."""


def clear_of_each_other(output: Tensor, given: Tensor, piece: int | None) -> Clear:
    """For calls that are given two whole tensors: they are apart, or the smaller one is this piece of the other one."""
    written, read = _extent(output), _extent(given)
    own = None
    if piece is not None and output.is_contiguous() and given.is_contiguous():
        own = piece * read if read < written else -piece * written

    def clear(tensors: Sequence[Tensor]) -> bool:
        output, given = tensors
        distance = given.data_ptr() - output.data_ptr()
        if distance >= written or distance <= -read:
            return True

        return distance == own and _read_alike(output, given)

    return clear


def clear_in_lists(tensors: Sequence[Tensor], roles: Roles) -> Clear:
    """For calls that are given each of their tensors: every input is apart from every output but its own."""
    sizes, strides = [_extent(tensor) for tensor in tensors], [tensor.stride() for tensor in tensors]
    pairs = [
        (number, output, -sizes[number], sizes[output], output == own and strides[number] == strides[output])
        for number, own in roles.inputs
        for output in roles.outputs
    ]

    def clear(tensors: Sequence[Tensor]) -> bool:
        places = [tensor.data_ptr() for tensor in tensors]
        for number, output, below, above, own in pairs:
            if below < (distance := places[number] - places[output]) < above:
                if not (own and not distance and _read_alike(tensors[number], tensors[output])):
                    return False

        return True

    return clear


def guarded(tensors: Sequence[Tensor], roles: Roles) -> list[Tensor]:
    """The tensors, with copies of the inputs that are at risk."""
    safe = list(tensors)
    outputs = [(*span(tensors[number]), number) for number in roles.outputs]
    if not outputs:
        return safe

    first, last = min([start for start, _, _ in outputs]), max([end for _, end, _ in outputs])
    for number, own in roles.inputs:
        tensor = tensors[number]
        start, end = span(tensor)
        if end <= first or last <= start:
            continue

        for out_start, out_end, output in outputs:
            if out_start < end and start < out_end and not (output == own and same_place(tensor, tensors[output])):
                safe[number] = cloned(tensor)
                break

    return safe


def meet(tensors: Sequence[Tensor]) -> bool:
    """Two of them, or more, may have memory in common."""
    spans = sorted([span(tensor) for tensor in tensors if tensor.nbytes])
    return any([start < end for (_, end), (start, _) in pairwise(spans)])


def _extent(tensor: Tensor) -> int:
    start, end = span(tensor)
    return end - start


def _read_alike(a: Tensor, b: Tensor) -> bool:
    """The same bytes are the same values in both."""
    return a.is_neg() == b.is_neg() and a.is_conj() == b.is_conj()
