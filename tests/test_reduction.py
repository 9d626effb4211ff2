"""The rule table of reductions, cell by cell: what it computes, what it refuses, and that it is what the table says."""

import itertools
import math

import pytest
import torch

from dtorch_core import UnsupportedOperationError, UnsupportedTensorError, reduction
from dtorch_core.reduction import HALF_COMPLEX, OPS, neutral, rule

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
HALF = [torch.float16, torch.bfloat16]
WIDE = [torch.float32, torch.float64]
COMPLEX = [*HALF_COMPLEX, torch.complex64, torch.complex128]
EIGHTS = [value for name, value in vars(torch).items() if name.startswith("float8") and isinstance(value, torch.dtype)]
ARITHMETIC = ["sum", "avg", "product", "min", "max"]
BITWISE = ["band", "bor", "bxor"]

REFUSED = {
    *((dtype, op) for dtype in [*HALF, *WIDE, *COMPLEX] for op in BITWISE),
    *((dtype, op) for dtype in COMPLEX for op in ("min", "max")),
    *((dtype, op) for dtype in EIGHTS for op in OPS),
    *((dtype, "premul_sum") for dtype in [*INTEGERS, torch.bool]),
    (torch.bool, "avg"),
}
ALLOWED = [
    (dtype, op)
    for dtype, op in itertools.product([*INTEGERS, *HALF, *WIDE, *COMPLEX, torch.bool], OPS)
    if (dtype, op) not in REFUSED
]

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")


def name(value):
    return str(value).removeprefix("torch.")


def reduce(op, *rows, dtype, factor=None):
    """The rule's result for one row of values of each rank, as a list."""
    inputs = [torch.tensor(row, dtype=dtype) for row in rows]
    out = torch.zeros_like(inputs[0])
    rule(op, dtype).into(out, inputs, factor)
    return out.tolist()


class TestTable:
    @pytest.mark.parametrize(("dtype", "op"), sorted(REFUSED, key=str), ids=name)
    def test_op_without_a_meaning_is_refused(self, dtype, op):
        with pytest.raises(UnsupportedTensorError, match=f"{op} of {name(dtype)} is not defined: "):
            rule(op, dtype)

        with pytest.raises(UnsupportedTensorError):
            neutral(op, dtype)

    @pytest.mark.parametrize(("dtype", "op"), ALLOWED, ids=name)
    def test_neutral_element_changes_nothing(self, dtype, op):
        values = [1, 0, 1, 1] if dtype is torch.bool else [1, 2, 3, 100]
        if op == "avg":
            pytest.skip("an average counts its terms")

        element = neutral(op, dtype)
        for rows in ([values, [element] * 4], [[element] * 4, values]):
            assert reduce(op, *rows, dtype=dtype) == torch.tensor(values, dtype=dtype).tolist()

    @pytest.mark.parametrize(("dtype", "op"), ALLOWED, ids=name)
    def test_one_rank_reduces_to_its_own_values(self, dtype, op):
        values = [1, 0, 1, 1] if dtype is torch.bool else [1, 2, 3, 100]
        assert reduce(op, values, dtype=dtype) == torch.tensor(values, dtype=dtype).tolist()

    def test_unknown_op_names_the_known_ones(self):
        with pytest.raises(UnsupportedOperationError, match=r"op 'summ'. Did you mean 'sum'\? Known: sum, avg"):
            rule("summ", torch.float32)

    def test_documented_table_has_every_op(self):
        text = reduction.__doc__
        for op in ("sum", "avg", "product", "min, max", "band", "premul_sum"):
            assert f"\n{op}" in text

    def test_dtype_without_kernels_is_refused(self):
        for dtype in (torch.bits8, torch.quint8) if hasattr(torch, "bits8") else (torch.quint8,):
            with pytest.raises(UnsupportedTensorError):
                rule("sum", dtype)


class TestIntegers:
    @pytest.mark.parametrize("dtype", INTEGERS, ids=name)
    def test_sum_and_product_wrap(self, dtype):
        limits = torch.iinfo(dtype)
        assert reduce("sum", [limits.max, limits.min], [1, 0], dtype=dtype) == [limits.min, limits.min]
        assert reduce("sum", [limits.max], [limits.max], [5], dtype=dtype) == [3]
        assert reduce("product", [limits.max], [2], dtype=dtype) == [-2 if limits.min else limits.max - 1]

    @pytest.mark.parametrize("dtype", INTEGERS, ids=name)
    def test_min_and_max_are_by_value(self, dtype):
        limits = torch.iinfo(dtype)
        rows = [[limits.max, 1, limits.min], [limits.min, 2, limits.max], [3, 0, 3]]
        assert reduce("min", *rows, dtype=dtype) == [limits.min, 0, limits.min]
        assert reduce("max", *rows, dtype=dtype) == [limits.max, 2, limits.max]

    @pytest.mark.parametrize("dtype", INTEGERS, ids=name)
    def test_avg_truncates_toward_zero_and_does_not_overflow(self, dtype):
        limits = torch.iinfo(dtype)
        assert reduce("avg", [7, 8, 9], [0, 1, 2], [1, 1, 1], dtype=dtype) == [2, 3, 4]
        if limits.bits < 64:
            assert reduce("avg", [limits.max], [limits.max], [limits.max - 1], dtype=dtype) == [limits.max - 1]
            assert reduce("avg", [limits.min], [limits.min], dtype=dtype) == [limits.min]

        if limits.min < 0:
            assert reduce("avg", [-7, -1, -2], [0, 0, -1], dtype=dtype) == [-3, 0, -1]

    def test_avg_of_large_unsigned_numbers(self):
        top = (1 << 64) - 1
        half = 1 << 63
        for values in ((top - 1, 0), (top, 0, 0), (half, half - 1), (top - 5, 1, 2), (top, *[0] * 6), (top, top)):
            wanted = sum(values) % (1 << 64) // len(values)
            assert reduce("avg", *[[value] for value in values], dtype=torch.uint64) == [wanted]

    def test_avg_of_many_pairs_of_unsigned_numbers(self):
        generator = torch.Generator().manual_seed(3)
        raw = torch.randint(-(2**63), 2**63 - 1, (3, 200), generator=generator)
        rows = [[value % (1 << 64) for value in row] for row in raw.tolist()]
        wanted = [sum(column) % (1 << 64) // 3 for column in zip(*rows, strict=True)]
        assert reduce("avg", *rows, dtype=torch.uint64) == wanted

    @pytest.mark.parametrize("dtype", INTEGERS, ids=name)
    def test_bits(self, dtype):
        rows = [[0b1100, 0b1010], [0b1010, 0b0110], [0b1001, 0b0011]]
        assert reduce("band", *rows, dtype=dtype) == [0b1000, 0b0010]
        assert reduce("bor", *rows, dtype=dtype) == [0b1111, 0b1111]
        assert reduce("bxor", *rows, dtype=dtype) == [0b1111, 0b1111]

    def test_bool_is_logical(self):
        rows = [[False, False, True, True], [False, True, False, True], [False, False, True, True]]
        wanted = {
            "sum": [False, True, True, True],
            "max": [False, True, True, True],
            "bor": [False, True, True, True],
            "product": [False, False, False, True],
            "min": [False, False, False, True],
            "band": [False, False, False, True],
            "bxor": [False, True, False, True],
        }
        for op, values in wanted.items():
            assert reduce(op, *rows, dtype=torch.bool) == values, op


class TestFloats:
    @pytest.mark.parametrize("dtype", HALF, ids=name)
    def test_half_precision_is_rounded_once(self, dtype):
        step = 1 / torch.finfo(dtype).eps  # here the next number is 2 away
        big = 2 * step
        assert reduce("sum", [big], [1.0], [1.0], dtype=dtype) == [big + 2]
        assert reduce("avg", [big], [1.0], [1.0], dtype=dtype) == torch.tensor([(big + 2) / 3]).to(dtype).tolist()

    def test_half_precision_overflow_in_between_is_none(self):
        tiny = torch.finfo(torch.float16).tiny
        assert reduce("product", [tiny], [tiny], [1 / tiny], dtype=torch.float16) == [tiny]
        assert reduce("sum", [60000.0], [60000.0], [-60000.0], dtype=torch.float16) == [60000.0]
        assert reduce("avg", [60000.0], [60000.0], dtype=torch.float16) == [60000.0]
        assert reduce("sum", [60000.0], [60000.0], dtype=torch.float16) == [math.inf]

    @pytest.mark.parametrize("dtype", [*HALF, *WIDE], ids=name)
    def test_nan_wins(self, dtype):
        nan = math.nan
        for op in ARITHMETIC:
            for rows in ([[nan], [1.0], [2.0]], [[1.0], [nan], [2.0]], [[1.0], [2.0], [nan]]):
                assert math.isnan(reduce(op, *rows, dtype=dtype)[0]), (op, rows)

    @pytest.mark.parametrize("dtype", WIDE, ids=name)
    def test_sum_is_in_rank_order(self, dtype):
        big = 1 / torch.finfo(dtype).eps
        assert reduce("sum", [1.0], [2 * big], [-2 * big], dtype=dtype) == [0.0]
        assert reduce("sum", [2 * big], [-2 * big], [1.0], dtype=dtype) == [1.0]

    @pytest.mark.parametrize("dtype", [*HALF, *WIDE, torch.complex64], ids=name)
    def test_premul_sum_multiplies_each_term(self, dtype):
        assert reduce("premul_sum", [2.0, 4.0], [6.0, 8.0], dtype=dtype, factor=0.25) == [2.0, 3.0]

    @pytest.mark.parametrize("dtype", HALF, ids=name)
    def test_premul_sum_is_rounded_once(self, dtype):
        limit = torch.finfo(dtype).max
        assert reduce("premul_sum", [limit], [limit], dtype=dtype, factor=0.5) == [limit]

    @pytest.mark.parametrize("dtype", COMPLEX, ids=name)
    def test_complex_numbers(self, dtype):
        assert reduce("sum", [1 + 2j], [3 - 5j], dtype=dtype) == [4 - 3j]
        assert reduce("product", [1 + 2j], [3 - 5j], dtype=dtype) == [13 + 1j]
        assert reduce("avg", [1 + 2j], [3 - 5j], dtype=dtype) == [2 - 1.5j]


class TestMemory:
    @pytest.mark.parametrize(("dtype", "op"), ALLOWED, ids=name)
    def test_out_may_be_the_first_input_and_of_any_layout(self, dtype, op):
        count = 12
        rows = [torch.arange(count).add(rank).remainder(2 if dtype is torch.bool else 7).to(dtype) for rank in range(3)]
        factor = 0.5 if op == "premul_sum" else None
        wanted = torch.zeros(count, dtype=dtype)
        rule(op, dtype).into(wanted, rows, factor)
        layouts = {
            "contiguous": lambda t: t.clone().reshape(3, 4),
            "transposed": lambda t: t.reshape(3, 4).t().contiguous().t(),
            "every second": lambda t: torch.stack([t, t], 1)[:, 0].unflatten(0, (3, 4)),
        }
        for how, layout in layouts.items():
            inputs = [layout(row) for row in rows]
            kept = [tensor.clone() for tensor in inputs[1:]]
            rule(op, dtype).into(inputs[0], inputs, factor)
            assert inputs[0].reshape(-1).tolist() == wanted.tolist(), how
            assert [t.tolist() for t in inputs[1:]] == [t.tolist() for t in kept], "another input was changed"

    def test_conjugate_and_negative_views_have_their_values(self):
        x = torch.complex(torch.arange(6.0), torch.arange(6.0) + 10)
        out = torch.zeros(6, dtype=torch.complex64)
        rule("sum", torch.complex64).into(out, [x.conj(), x])
        assert torch.equal(out, torch.complex(2 * torch.arange(6.0), torch.zeros(6)))
        rule("sum", torch.complex64).into(out.conj(), [x, x])
        assert torch.equal(out, 2 * x.conj().resolve_conj())
        real = torch.zeros(6)
        rule("sum", torch.float32).into(real, [x.conj().imag, x.imag])
        assert torch.equal(real, torch.zeros(6))

    def test_empty_and_0_dim(self):
        for shape in ((), (0,), (2, 0, 3)):
            for dtype, op in ALLOWED:
                x = torch.ones(shape).to(dtype)
                out = torch.zeros(shape).to(dtype)
                rule(op, dtype).into(out, [x, x], 0.5 if op == "premul_sum" else None)
                assert out.shape == shape

    def test_rules_are_made_once(self):
        assert rule("sum", torch.float32) is rule("sum", torch.float32)
