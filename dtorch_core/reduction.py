"""The rule table of reductions: what sum, avg, min ... mean for each dtype, equal for all backends that declare it.

============ ============================== ================= ==================== =====================
op           float32, float64               float16, bfloat16 integers             bool / complex / fp8
============ ============================== ================= ==================== =====================
sum          in rank order                  in float32 [1]_   wraps                or / yes / refused
avg          sum / N                        in float32 [1]_   truncates [2]_       refused / yes / refused
product      in rank order                  in float32 [1]_   wraps                and / yes / refused
min, max     NaN wins                       NaN wins          by value             and, or / refused / refused
band ...     refused                        refused           bitwise              logical / refused / refused
premul_sum   sum of factor * x              in float32 [1]_   refused              refused / yes / refused
============ ============================== ================= ==================== =====================

.. [1] accumulated in float32 and rounded once, at the end.
.. [2] the sum is exact (int64, wrapping only for 64-bit integers), the quotient is truncated toward zero.

The order is the rank order, always, so results are bitwise equal on every rank and from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dtorch_core._text import did_you_mean
from dtorch_core.errors import UnsupportedOperationError, UnsupportedTensorError

OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""The reduce ops, as callers write them."""

_BITWISE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "band": (torch.bitwise_and, torch.logical_and),
    "bor": (torch.bitwise_or, torch.logical_or),
    "bxor": (torch.bitwise_xor, torch.logical_xor),
}
_ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
_BOOL: dict[str, Callable[..., Tensor]] = {
    "sum": torch.logical_or,
    "product": torch.logical_and,
    "min": torch.logical_and,
    "max": torch.logical_or,
}
# torch computes little with the wide unsigned types; sums, products and bits are the same in the signed twin.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED}
_HALF = (torch.float16, torch.bfloat16)
_TOP_BIT = -(2**63)
HALF_COMPLEX = tuple(getattr(torch, name) for name in ("complex32", "bcomplex32") if hasattr(torch, name))
"""Complex numbers of two half-precision ones; the second since torch 2.14."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How to reduce one op on one dtype."""

    op: str
    dtype: torch.dtype
    combine: Callable[..., Tensor]
    """``combine(a, b, out=c)``, elementwise."""
    twin: torch.dtype | None = None
    """Compute on the same bytes read as this dtype."""
    accumulate: torch.dtype | None = None
    """Compute in this dtype, in scratch memory; None: in the tensors' own."""
    in_place: bool = field(init=False)
    """The result can be computed in one of the tensors itself, without scratch memory."""

    def __post_init__(self) -> None:
        in_place = self.accumulate is None and not self.flips and self.op != "premul_sum"
        object.__setattr__(self, "in_place", in_place)

    @property
    def flips(self) -> bool:
        """uint64 order: with the top bit flipped, the signed order is the unsigned one."""
        return self.dtype is torch.uint64 and self.op in ("min", "max")

    def into(self, out: Tensor, inputs: Sequence[Tensor], factor: float | None = None) -> None:
        """Write the reduction of ``inputs``, in their order, to ``out``.

        All have one shape. ``out`` may be one of the first two inputs, and any of them if nothing is computed
        :attr:`in_place`; it must not overlap another one.
        """
        if self.twin is not None:
            out, inputs = out.view(self.twin), [tensor.view(self.twin) for tensor in inputs]

        if not self.in_place:
            out.copy_(self._in_scratch(inputs, factor))
            return

        if len(inputs) == 1:
            out.copy_(inputs[0])
        else:
            self.combine(inputs[0], inputs[1], out=out)
            for tensor in inputs[2:]:
                self.combine(out, tensor, out=out)

        if self.op == "avg":
            _divide(out, len(inputs))

    def _in_scratch(self, inputs: Sequence[Tensor], factor: float | None) -> Tensor:
        total = self._term(inputs[0], factor)
        for tensor in inputs[1:]:
            self.combine(total, self._term(tensor, factor), out=total)

        if self.flips:
            total ^= _TOP_BIT

        if self.op == "avg":
            total = _quotient(total, len(inputs), self.dtype)

        return total

    def _term(self, tensor: Tensor, factor: float | None) -> Tensor:
        term = tensor.to(self.accumulate or tensor.dtype, copy=True)
        if self.flips:
            term ^= _TOP_BIT

        return term.mul_(factor) if factor is not None else term


@cache
def rule(op: str, dtype: torch.dtype) -> Rule:
    """The rule for ``op`` on ``dtype``.

    :raises UnsupportedOperationError: if there is no such op.
    :raises UnsupportedTensorError: if the op has no meaning on this dtype, or no exact one.
    """
    if op not in OPS:
        raise UnsupportedOperationError(f"there is no reduce op {op!r}.{did_you_mean(op, OPS)} Known: {', '.join(OPS)}")

    if dtype.itemsize == 1 and dtype.is_floating_point or "float4" in str(dtype):
        raise _refused(op, dtype, "8-bit floats carry no sum; convert to bfloat16 or float32 first")

    if dtype is torch.bool:
        return _bool_rule(op)

    if not (dtype.is_floating_point or dtype.is_complex or dtype in _INTEGERS):
        raise _refused(op, dtype, "torch computes nothing with this dtype; convert to another one first")

    if op in _BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise _refused(op, dtype, "bits of floats have no arithmetic; use an integer dtype")

        return Rule(op, dtype, _BITWISE[op][0], twin=_SIGNED.get(dtype))

    combine = _ARITHMETIC[op]
    if dtype.is_complex:
        if op in ("min", "max"):
            raise _refused(op, dtype, "complex numbers have no order")

        return Rule(op, dtype, combine, accumulate=torch.complex64 if dtype in HALF_COMPLEX else None)

    if dtype.is_floating_point:
        narrow = dtype in _HALF and op not in ("min", "max")
        return Rule(op, dtype, combine, accumulate=torch.float32 if narrow else None)

    return _integer_rule(op, dtype, combine)


def _bool_rule(op: str) -> Rule:
    if op in _BITWISE:
        return Rule(op, torch.bool, _BITWISE[op][1])

    if op not in _BOOL:
        raise _refused(op, torch.bool, "use sum (or), product (and), or convert to an integer dtype")

    return Rule(op, torch.bool, _BOOL[op])


def _integer_rule(op: str, dtype: torch.dtype, combine: Callable[..., Tensor]) -> Rule:
    if op == "premul_sum":
        raise _refused(op, dtype, "a factor would be rounded; use a floating dtype")

    twin = _SIGNED.get(dtype)
    if op == "avg":
        wide = torch.int64
        return Rule(op, dtype, combine, twin=torch.int64 if dtype is torch.uint64 else None, accumulate=wide)

    if op in ("min", "max") and twin is not None:
        if dtype is torch.uint64:
            return Rule(op, dtype, combine, twin=twin)

        return Rule(op, dtype, combine, accumulate=torch.int64)

    return Rule(op, dtype, combine, twin=twin)


def _quotient(total: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    if dtype is torch.uint64:
        # Unsigned division by halves: the top bit of an int64 is a sign to torch.
        half = (total >> 1) & ~_TOP_BIT
        quotient = half.div_(count, rounding_mode="floor").mul_(2)
        rest = total - quotient * count
        return quotient + ((rest < 0) | (rest >= count)).to(torch.int64)

    if total.is_floating_point() or total.is_complex():
        return _divide(total, count)

    return total.div_(count, rounding_mode="trunc")


def _divide(total: Tensor, count: int) -> Tensor:
    # By a tensor on the device: by a number, CUDA multiplies with the reciprocal, which rounds twice.
    return total.div_(torch.full((), count, dtype=total.dtype, device=total.device) if total.is_cuda else count)


def _refused(op: str, dtype: torch.dtype, way_out: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(f"{op} of {str(dtype).removeprefix('torch.')} is not defined: {way_out}")


def neutral(op: str, dtype: torch.dtype) -> Any:  # noqa: ANN401 - a number of the dtype
    """The element that changes nothing: 0 for sum, 1 for product, the largest value for min ...

    :raises UnsupportedTensorError: if the op has no meaning on this dtype.
    """
    rule(op, dtype)
    if dtype is torch.bool:
        return op in ("product", "min", "band")

    if op in ("sum", "avg", "premul_sum", "bor", "bxor"):
        return 0

    if op == "product":
        return 1

    if op == "band":
        return torch.iinfo(dtype).max if dtype in _SIGNED or dtype is torch.uint8 else -1

    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")

    limits = torch.iinfo(dtype)
    return limits.max if op == "min" else limits.min
