"""What sum, avg, min ... give for each dtype, against oracles that know nothing of the rule table."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dtorch_core.errors import UnsupportedOperationError, UnsupportedTensorError
from dtorch_core.group import ThreadGroup
from dtorch_core.reduction import HALF_COMPLEX
from dtorch_core.testing._group_base import WORLDS, GroupConformance, chunks, coded, same
from dtorch_core.testing._harness import requires, undeclared

WIDTHS = {
    torch.int8: 8,
    torch.int16: 16,
    torch.int32: 32,
    torch.int64: 64,
    torch.uint8: 8,
    torch.uint16: 16,
    torch.uint32: 32,
    torch.uint64: 64,
}
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (*HALF_COMPLEX, torch.complex64, torch.complex128)
WIDER = {dtype: torch.float32 for dtype in (torch.float16, torch.bfloat16)}
WIDER |= {dtype: torch.complex64 for dtype in HALF_COMPLEX}

ARITHMETIC = ("sum", "avg", "product", "min", "max")
BITWISE = ("band", "bor", "bxor")

_FOLDS: dict[str, Callable[[int, int], int]] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "min": min,
    "max": max,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}
_TENSOR_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
_BOOL = {"sum": "bor", "product": "band", "min": "band", "max": "bor", "band": "band", "bor": "bor", "bxor": "bxor"}


def wrapped(value: int, dtype: torch.dtype) -> int:
    """A whole number as the dtype holds it."""
    value &= (1 << WIDTHS[dtype]) - 1
    return value - (1 << WIDTHS[dtype]) if dtype in SIGNED and value >> (WIDTHS[dtype] - 1) else value


def whole_number(op: str, values: Sequence[int], dtype: torch.dtype) -> int:
    """The reduction of one element over the ranks, with Python's exact numbers."""
    total = functools.reduce(_FOLDS[op], values)
    if op != "avg":
        return wrapped(total, dtype)

    if WIDTHS[dtype] == 64:
        total = wrapped(total, dtype)

    quotient = abs(total) // len(values)
    return -quotient if total < 0 else quotient


def reduced(op: str, xs: Sequence[Tensor]) -> Tensor:
    """What the rules say that ``op`` of ``xs`` is, in rank order."""
    dtype = xs[0].dtype
    if dtype is torch.bool:
        flags = [[int(value) for value in x.tolist()] for x in xs]
        values = [functools.reduce(_FOLDS[_BOOL[op]], column) for column in zip(*flags, strict=True)]
        return torch.tensor(values, dtype=dtype)

    if dtype in WIDTHS:
        rows = [x.tolist() for x in xs]
        return torch.tensor([whole_number(op, column, dtype) for column in zip(*rows, strict=True)], dtype=dtype)

    wide = WIDER.get(dtype, dtype) if op not in ("min", "max") else dtype
    total = functools.reduce(_TENSOR_FOLDS[op], [x.to(wide) for x in xs])
    return (total / len(xs) if op == "avg" else total).to(dtype)


def input_of(rank: int, dtype: torch.dtype) -> Tensor:
    """Twelve values: the smallest, the largest, those that overflow, and those that floats know."""
    if dtype is torch.bool:
        return torch.tensor([(position >> (rank % 3)) & 1 for position in range(12)], dtype=dtype)

    if dtype in WIDTHS:
        top = (1 << WIDTHS[dtype]) - 1
        values = [0, top, top >> 1, (top >> 1) + 1, 7 * rank + 3, -5 - rank, 100 + rank, 120 - 50 * rank]
        values += [(rank + 2) * 0x1234567 + position for position in range(4)]
        return torch.tensor([wrapped(value, dtype) for value in values], dtype=dtype)

    if dtype in COMPLEX:
        real = torch.arange(12.0) * 0.37 - rank
        return torch.complex(real, 3 - real * (rank + 1)).to(dtype)

    special = [float("inf"), float("nan") if rank == 1 else 1.0, -0.0 if rank else 0.0, 0.1, -1e4, 3e-5]
    return torch.tensor([*special, *(0.3 * position + 1.7**rank for position in range(6))]).to(dtype)


class ReductionTests(GroupConformance):
    """The rule table, op by op."""

    def _agrees(self, got: Tensor | None, wanted: Tensor | None, case: str) -> None:
        if wanted is None or got is None:
            assert got is wanted is None, case
            return

        # How a product of complex numbers is rounded depends on torch's loops.
        exact = "rank_order" in self.declared and not wanted.is_complex() or wanted.dtype in (torch.bool, *WIDTHS)
        tolerance = 0.0 if exact else None
        torch.testing.assert_close(
            got.cpu(),
            wanted,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text: f"{case}: {text}, got {got}, not {wanted}",
        )

    def _reduces(self, ops: Sequence[str], dtypes: Sequence[torch.dtype], world_size: int, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            for dtype in dtypes:
                xs = [input_of(rank, dtype) for rank in range(world_size)]
                mine = xs[group.rank].to(group.device)
                for op in ops:
                    wanted = reduced(op, xs)
                    case = f"{op} of {dtype}"
                    self._agrees(group.all_reduce(mine, op), wanted, f"all_reduce, {case}")
                    at_root = wanted if group.rank == world_size - 1 else None
                    self._agrees(group.reduce(mine, world_size - 1, op), at_root, f"reduce, {case}")
                    if 12 % world_size == 0 or "uneven" in self.declared:
                        part = chunks(wanted, world_size, 0)[group.rank]
                        self._agrees(group.reduce_scatter(mine, 0, op), part, f"reduce_scatter, {case}")

        self.ranks(body, world_size, device)

    @WORLDS
    def test_reduction_of_whole_numbers_is_exact_and_wraps(self, world_size: int, device: str) -> None:
        self._reduces(ARITHMETIC, list(WIDTHS), world_size, device)

    @WORLDS
    def test_reduction_of_floats(self, world_size: int, device: str) -> None:
        """Half precision adds in float32 and rounds once; NaN wins."""
        self._reduces(ARITHMETIC, FLOATS, world_size, device)

    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
    @WORLDS
    def test_reduction_of_complex_numbers(self, world_size: int, device: str) -> None:
        self._reduces(("sum", "avg", "product"), COMPLEX, world_size, device)

    @WORLDS
    def test_reduction_of_bool_is_logical(self, world_size: int, device: str) -> None:
        self._reduces(("sum", "product", "min", "max"), [torch.bool], world_size, device)

    @requires("bitwise_ops")
    @WORLDS
    def test_bitwise_reduction(self, world_size: int, device: str) -> None:
        self._reduces(BITWISE, [torch.bool, *WIDTHS], world_size, device)

    @undeclared("bitwise_ops")
    def test_bitwise_reduction_is_refused(self) -> None:
        def body(group: ThreadGroup) -> None:
            for op in BITWISE:
                with pytest.raises(UnsupportedOperationError, match="bitwise_ops"):
                    group.all_reduce(coded(0, device=group.device, dtype=torch.int32), op)

        self.ranks(body, 2)

    @requires("rank_order")
    def test_half_precision_is_rounded_once(self, device: str) -> None:
        """2048 + 1 + 1 is 2050 in float32 and stays 2048 where each step is rounded to float16."""

        def body(group: ThreadGroup) -> None:
            x = torch.tensor([2048.0 if group.rank == 0 else 1.0], dtype=torch.float16, device=group.device)
            assert group.all_reduce(x).item() == 2050

        self.ranks(body, 3, device)

    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
    def test_reduction_without_a_meaning_is_refused_on_every_rank(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            eights = [value for name, value in vars(torch).items() if name.startswith("float8") and "x2" not in name]
            cases = [(dtype, op) for dtype in eights for op in ARITHMETIC]
            cases += [(torch.bool, "avg"), *((dtype, op) for dtype in COMPLEX for op in ("min", "max"))]
            if "bitwise_ops" in self.declared:
                cases += [(dtype, op) for dtype in (*FLOATS, *COMPLEX) for op in BITWISE]

            for dtype, op in cases:
                x = torch.zeros(4, device=group.device).to(dtype)
                for call in (group.all_reduce, group.reduce, group.reduce_scatter):
                    with pytest.raises(UnsupportedTensorError, match=op):
                        call(x, op=op)

            assert same(group.all_reduce(coded(0, device=group.device)), 2 * coded(0, device=group.device))

        self.ranks(body, 2, device)

    def test_reduction_that_does_not_exist_is_refused(self) -> None:
        def body(group: ThreadGroup) -> None:
            for op in ("summ", "premul_sum", ""):
                with pytest.raises(UnsupportedOperationError, match=op or "no reduce op"):
                    group.all_reduce(coded(0, device=group.device), op)

        self.ranks(body, 2)

    def test_reduction_of_nothing(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            for dtype in (torch.float32, torch.int64, torch.bool):
                x = torch.empty(0, 2, dtype=dtype, device=group.device)
                for op in ("sum", "product", "min", "max"):
                    assert same(group.all_reduce(x, op), x)
                    assert same(group.reduce_scatter(x, 0, op), x)

        self.ranks(body, 2, device)
