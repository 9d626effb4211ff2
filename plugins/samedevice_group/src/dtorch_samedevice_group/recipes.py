"""Which reductions a fused kernel does, and how: a table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dtorch_core.reduction import Rule

_OPS = {"sum": "add", "avg": "add", "product": "mul", "min": "min", "max": "max"}
_HALF = (torch.float16, torch.bfloat16)
_FUSED = {
    torch.float64: {"sum", "avg", "product"},
    **dict.fromkeys((torch.float32, *_HALF), set(_OPS)),
    **dict.fromkeys((torch.int32, torch.int64), {"sum", "min", "max"}),
}
"""Each is a kernel that is compiled when it is first used, for every number of ranks: so what is rare is not here."""


class Recipe(NamedTuple):
    """What a reducing kernel is compiled for."""

    op: str
    divide: bool
    """By the number of ranks, at the end."""
    dtype: torch.dtype
    """In memory."""
    compute: torch.dtype


def recipe(rule: Rule, factor: float | None) -> Recipe | None:
    """A kernel's way to the result of :meth:`Rule.into`; None where that would be another bit by bit, or is rare.

    =========== ======= ======= ================= ============ ======
    op          float64 float32 float16, bfloat16 int32, int64 others
    =========== ======= ======= ================= ============ ======
    sum         yes     yes     in float32        yes          no
    avg         yes     yes     in float32        no           no
    product     yes     yes     in float32        no           no
    min, max    no [1]_ yes     yes               yes          no
    others      no      no      no                no           no
    =========== ======= ======= ================= ============ ======

    .. [1] of 0.0 and -0.0 Triton takes the other one.
    """
    dtype, op = rule.dtype, rule.op
    if factor is not None or op not in _FUSED.get(dtype, ()):
        return None

    return Recipe(_OPS[op], op == "avg", dtype, rule.accumulate or dtype)
