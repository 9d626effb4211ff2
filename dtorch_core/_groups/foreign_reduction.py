"""The rule table of reductions over a group that computes by rules of its own.

Each rule becomes one reduction that such groups agree on, before which the values are turned into others and after
which they are turned back: half precision travels as float32, the mean as the sum, bool as bytes, NaN as the largest
or smallest number. What has no such form is gathered, and every rank reduces it by itself, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dtorch_core._copies import plain
from dtorch_core._groups.stand_ins import CARRIED
from dtorch_core.reduction import HALF_COMPLEX, _divide, _quotient

Turn = Callable[[Tensor], Tensor]

_TOP_BIT = -(2**63)
_HALF = (torch.float16, torch.bfloat16)
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_BITWISE = ("band", "bor", "bxor")
_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max"} | {op: op for op in _BITWISE}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one op on one dtype travels."""

    op: str
    """What the group computes."""
    there: Turn | None = None
    """A contiguous tensor of values to reduce, new memory; None: the tensor itself."""
    back: Callable[[Tensor, int], Tensor] | None = None
    """Of the reduced values, and how many ranks there are: the result, in any dtype that ``copy_`` turns into it. In
    place where there is no ``there``."""
    view: torch.dtype | None = None
    """Read the tensors' own bytes as this dtype first, and write the result so."""
    gathered: bool = False
    """No reduction of the group does it."""


@cache
def recipe(op: str, dtype: torch.dtype, world_size: int) -> Recipe:
    """The recipe for an op that :func:`dtorch_core.reduction.rule` allows on this dtype."""
    if dtype is torch.bool:
        return Recipe(_BOOL[op], lambda x: plain(x).to(torch.uint8), lambda y, n: y)

    if op in _BITWISE:
        return Recipe(op)

    if dtype.is_complex:
        return _complex_recipe(op, dtype)

    if not dtype.is_floating_point:
        return _whole_recipe(op, dtype)

    if op in ("min", "max"):
        return Recipe(op, lambda x: _in_order(plain(x), op), lambda y, n: _from_order(y))

    if dtype not in _HALF:
        return Recipe("sum", None, _divide) if op == "avg" else Recipe(op)

    if op == "avg":
        return Recipe("sum", lambda x: plain(x).to(torch.float32), _divide)

    # A sum of two is rounded once in any case.
    return Recipe(op) if world_size <= 2 else Recipe(op, lambda x: plain(x).to(torch.float32), _same)


def _same(y: Tensor, n: int) -> Tensor:
    return y


def _complex_recipe(op: str, dtype: torch.dtype) -> Recipe:
    if op == "product":
        return Recipe(op, gathered=True)

    wide = torch.complex64 if dtype in HALF_COMPLEX else dtype

    def back(y: Tensor, n: int) -> Tensor:
        total = torch.view_as_complex(y)
        return _divide(total, n) if op == "avg" else total

    return Recipe("sum", lambda x: torch.view_as_real(plain(x).to(wide, copy=True)), back)


def _whole_recipe(op: str, dtype: torch.dtype) -> Recipe:
    view = torch.int64 if dtype is torch.uint64 else None
    if op == "avg":
        return Recipe("sum", lambda x: plain(x).to(torch.int64, copy=True), lambda y, n: _quotient(y, n, dtype), view)

    if view is not None:
        if op in ("min", "max"):
            return Recipe(op, lambda x: plain(x) ^ _TOP_BIT, lambda y, n: y ^ _TOP_BIT, view)

        return Recipe(op, lambda x: plain(x).clone(), _same, view)

    if dtype in CARRIED:
        return Recipe(op)

    # Sums and products of more bits have the same low ones.
    return Recipe(op, lambda x: plain(x).to(_WIDER[dtype]), lambda y, n: y)


def _in_order(x: Tensor, op: str) -> Tensor:
    """Whole numbers in the order of the floats, with NaN beyond the last one of that side that wins."""
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    bits, top = (torch.int64, 2**63 - 1) if wide.dtype is torch.float64 else (torch.int32, 2**31 - 1)
    values = wide.view(bits)
    ordered = values ^ ((values >> (bits.itemsize * 8 - 1)) & top)
    return ordered.masked_fill_(wide.isnan(), top if op == "max" else -top - 1)


def _from_order(y: Tensor) -> Tensor:
    top, floats = (2**63 - 1, torch.float64) if y.dtype is torch.int64 else (2**31 - 1, torch.float32)
    return (y ^ ((y >> (y.dtype.itemsize * 8 - 1)) & top)).view(floats)
