"""Which reductions a fused kernel does, and how: a table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dtorch_core.reduction import Rule

_OPS = {
    "sum": "add",
    "avg": "add",
    "product": "mul",
    "min": "min",
    "max": "max",
    "band": "and",
    "bor": "or",
    "bxor": "xor",
}
_BOOL_OPS = {"sum": "or", "product": "and", "min": "and", "max": "or", "band": "and", "bor": "or", "bxor": "xor"}


class Recipe(NamedTuple):
    """What a reducing kernel is compiled for."""

    op: str
    divide: bool
    """By the number of ranks, at the end."""
    dtype: torch.dtype
    """In memory."""
    compute: torch.dtype


def recipe(rule: Rule, factor: float | None) -> Recipe | None:
    """A kernel's way to the result of :meth:`Rule.into`; None where that would be another bit by bit, or rare.

    ============ ================ ================= ======== ======== ========
    op           float32, float64 float16, bfloat16 integers bool     complex
    ============ ================ ================= ======== ======== ========
    sum          yes              in float32        yes      or       no [1]_
    avg          yes              in float32        no [2]_  -        no [1]_
    product      yes              in float32        yes      and      no
    min, max     yes              yes               yes      and, or  -
    band ...     -                -                 yes      logical  -
    premul_sum   no [2]_          no [2]_           -        -        no
    ============ ================ ================= ======== ======== ========

    .. [1] torch adds 1 times the other number, which makes NaN of infinite parts, and divides by multiplying.
    .. [2] rare.
    """
    dtype = rule.dtype
    if dtype is torch.bool:
        return Recipe(_BOOL_OPS[rule.op], False, torch.uint8, torch.bool)

    if factor is not None or rule.op not in _OPS or dtype.is_complex:
        return None

    if not dtype.is_floating_point:
        return None if rule.op == "avg" else Recipe(_OPS[rule.op], False, dtype, dtype)

    return Recipe(_OPS[rule.op], rule.op == "avg", dtype, rule.accumulate or dtype)
