"""redistribute: every cell of the matrix against a dense oracle, on one mesh dimension."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import plan_redistribution, redistribute, spawn
from dtorch_core.reduction import neutral, rule

OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
SHAPES = [(8, 6), (5, 7), (1, 3), (0, 4), (3, 0), (2, 3, 4), (6,)]


def coded(shape, dtype=torch.int64):
    """Every element tells where it is."""
    return (torch.arange(torch.Size(shape).numel()) + 1).reshape(shape).to(dtype)


def chunks(full, dim, parts):
    """What torch.chunk gives, with empty chunks at the end where it gives fewer."""
    found = list(full.chunk(parts, dim))
    return found + [full.narrow(dim, 0, 0)] * (parts - len(found))


def uneven(full, dim, parts):
    """Chunks of sizes that torch.chunk never gives: the first is empty, the last the longest."""
    size = full.shape[dim]
    points = [min(size, part * (part - 1) // 2) for part in range(1, parts)]
    return [full.narrow(dim, a, b - a) for a, b in zip([0, *points], [*points, size], strict=True)]


def terms(full, op, parts):
    """Contributions, all different, whose reduction is ``full``."""
    noise = [(coded(full.shape, full.dtype) + part) % 5 for part in range(1, parts)]
    if op in ("sum", "avg"):
        return [full - sum(noise, torch.zeros_like(full)), *noise] if op == "sum" else _mean(full, noise)

    if op == "product":
        signs = [1 - 2 * (n % 2) for n in noise]
        return [torch.stack([full, *signs]).prod(0).to(full.dtype), *signs]

    if op in ("min", "max"):
        more = [full + n if op == "min" else full - n for n in noise]
        return [*more, full]

    if op == "band":
        return [*(full | n for n in noise), full]

    if op == "bor":
        return [*(full & n for n in noise), full]

    total = full
    for n in noise:
        total = total ^ n

    return [*noise, total]


def _mean(full, noise):
    rest = sum(noise, torch.zeros_like(full))
    return [full - rest, *(full + n for n in noise)]


def reduced(parts, op):
    """The value of a Partial."""
    out = torch.empty_like(parts[0])
    rule(op, out.dtype).into(out, [part.clone() for part in parts])
    return out


def pieces(full, placement, parts, cut=chunks):
    """What each rank holds of ``full``."""
    if placement.is_shard():
        return cut(full, placement.dim, parts)

    return [full] * parts if placement.is_replicate() else terms(full, placement.reduce_op, parts)


def check(results, full, dst, what):
    """Each rank's result is what ``dst`` says."""
    if dst.is_partial():
        assert torch.equal(reduced(results, dst.reduce_op), full), what
    else:
        for result, wanted in zip(results, pieces(full, dst, len(results)), strict=True):
            assert torch.equal(result, wanted), (what, result, wanted)
            assert result.shape == wanted.shape, what

    for result in results:
        assert result.dtype == full.dtype
        assert result.is_contiguous()


def placements(ndim, ops):
    """Everything that a tensor of so many dimensions can be on one mesh dimension."""
    return [Replicate(), *(Shard(dim) for dim in range(-ndim, ndim)), *map(Partial, ops)]


def run_cases(cases, world_size):
    """Run (source pieces, src, dst, shape) on ranks; each rank's results."""

    def run(ctx):
        group = ctx.open_group(timeout=20)
        results = []
        for held, src, dst, shape in cases:
            x = held[ctx.rank].clone()
            before = x.clone()
            results.append(redistribute(x, group, src, dst, shape=shape))
            assert torch.equal(x, before)

        return results

    return list(zip(*spawn(run, world_size, timeout=120), strict=True))


class TestMatrix:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    @pytest.mark.parametrize("known", [False, True], ids=["sizes exchanged", "shape given"])
    def test_every_cell_and_dim(self, world_size, known):
        cases, wanted = [], []
        for shape in SHAPES:
            full = coded(shape)
            kinds = placements(len(shape), ["sum", "max"])
            for src in kinds:
                for dst in kinds:
                    cases.append((pieces(full, src, world_size), src, dst, shape if known else None))
                    wanted.append((full, dst))

        for results, (full, dst), case in zip(run_cases(cases, world_size), wanted, cases, strict=True):
            src, shape = case[1], list(full.shape)
            same = src == dst or src.is_shard() and dst.is_shard() and (src.dim - dst.dim) % len(shape) == 0
            if not same:
                check(results, full, dst, (src, dst, shape))
            else:
                assert all(map(torch.equal, results, case[0])), (src, dst, shape)

    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_shards_of_any_sizes(self, world_size):
        cases, wanted = [], []
        for shape in SHAPES:
            full = coded(shape)
            for dim in range(-len(shape), len(shape)):
                for dst in placements(len(shape), ["sum", "avg", "min"]):
                    if not dst.is_shard() or (dim - dst.dim) % len(shape):
                        cases.append((uneven(full, dim, world_size), Shard(dim), dst, None))
                        wanted.append((full, dst))

        for results, (full, dst), case in zip(run_cases(cases, world_size), wanted, cases, strict=True):
            check(results, full, dst, (case[1], dst, list(full.shape)))

    @pytest.mark.parametrize("op", OPS)
    def test_every_op_to_and_from(self, op):
        cases, wanted = [], []
        for shape in [(5, 3), (), (0,)]:
            full = coded(shape)
            for other in placements(len(shape), OPS):
                for src, dst in [(Partial(op), other), (other, Partial(op))]:
                    if src != dst:
                        cases.append((pieces(full, src, 3), src, dst, None))
                        wanted.append((full, dst))

        for results, (full, dst), case in zip(run_cases(cases, 3), wanted, cases, strict=True):
            check(results, full, dst, (case[1], dst, list(full.shape)))

    @pytest.mark.parametrize(
        "dtype",
        [torch.bool, torch.uint8, torch.int8, torch.int32, torch.uint16, torch.uint64]
        + [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64],
        ids=str,
    )
    def test_every_dtype(self, dtype):
        full = coded((5, 4)) % 2 if dtype is torch.bool else coded((5, 4))
        full = full.to(dtype)
        summands = [full] + [torch.zeros_like(full)] * 2
        cases = [
            (chunks(full, 0, 3), Shard(0), Replicate(), None),
            (chunks(full, 0, 3), Shard(0), Shard(1), None),
            (chunks(full, 0, 3), Shard(0), Partial(), None),
            ([full] * 3, Replicate(), Partial("product"), None),
            (summands, Partial(), Replicate(), None),
            (summands, Partial(), Shard(1), None),
        ]
        for results, case in zip(run_cases(cases, 3), cases, strict=True):
            check(results, full, case[2], case[1:3])

    def test_eight_bit_floats_move_but_are_no_partials(self):
        full = coded((4, 4)).to(torch.float8_e5m2)
        cases = [(chunks(full, 0, 2), Shard(0), Replicate(), None), (chunks(full, 0, 2), Shard(0), Shard(1), None)]
        for results, case in zip(run_cases(cases, 2), cases, strict=True):
            wanted = pieces(full, case[2], 2)
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(results, wanted, strict=True))


class TestWhatARankHolds:
    def test_partial_of_a_replicate_is_the_value_on_rank_0(self):
        full = coded((2, 3))
        for op in OPS:
            ((first, *others),) = run_cases([([full] * 3, Replicate(), Partial(op), None)], 3)
            assert torch.equal(first, full)
            for other in others:
                expected = full if op == "avg" else torch.full_like(full, neutral(op, full.dtype))
                assert torch.equal(other, expected), op

    def test_partial_of_a_shard_is_padded(self):
        full = coded((3, 2))
        (results,) = run_cases([(uneven(full, 0, 3), Shard(0), Partial("min"), None)], 3)
        most = torch.iinfo(torch.int64).max
        assert [result[:, 0].tolist() for result in results] == [[most] * 3, [1, most, most], [most, 3, 5]]

    def test_integer_avg_truncates_toward_zero(self):
        held = [torch.tensor([-7, 7, -1, 100], dtype=torch.int8), torch.tensor([0, 0, 0, 101], dtype=torch.int8)]
        (whole, part) = run_cases(
            [(held, Partial("avg"), Replicate(), None), (held, Partial("avg"), Shard(0), None)], 2
        )
        assert whole[1].tolist() == [-3, 3, 0, 100]
        assert [result.tolist() for result in part] == [[-3, 3], [0, 100]]

    def test_itself_is_the_same_tensor(self):
        def run(ctx):
            group = ctx.open_group(timeout=20)
            x = coded((4, 4)).float().requires_grad_()
            for src, dst in [(Shard(0), Shard(0)), (Shard(-1), Shard(1)), (Replicate(), Replicate())]:
                assert redistribute(x, group, src, dst) is x

            assert redistribute(x, group, Partial("min"), Partial("min")) is x

        spawn(run, 2, timeout=30)

    @pytest.mark.parametrize("world_size", [1, 3])
    def test_all_else_is_memory_of_its_own(self, world_size):
        def run(ctx):
            group = ctx.open_group(timeout=20)
            base = coded((6, 6)).float().requires_grad_()
            x = base[:, 2:5]
            kinds = placements(2, ["sum", "avg"])
            for src in kinds:
                for dst in kinds:
                    result = redistribute(x, group, src, dst)
                    if result is not x:
                        owned = result.untyped_storage()
                        assert owned.data_ptr() != base.untyped_storage().data_ptr(), (src, dst)
                        assert owned.nbytes() == result.nbytes, (src, dst)
                        assert not result.requires_grad

        spawn(run, world_size, timeout=30)

    def test_strided_expanded_conjugate_and_negative_parts(self):
        whole = torch.complex(coded((3, 4)).float(), coded((3, 4)).float() + 50)
        strided = whole.t().contiguous().t()
        views = [strided, whole[:1].expand(3, 4), whole.conj(), whole.conj().imag]

        def run(ctx):
            group = ctx.open_group(timeout=20)
            return [
                (
                    redistribute(x, group, Shard(0), Replicate()),
                    redistribute(x, group, Shard(0), Shard(1)),
                    redistribute(x, group, Partial(), Replicate()),
                    redistribute(x, group, Partial(), Shard(0)),
                    redistribute(x, group, Replicate(), Shard(1)),
                )
                for x in views
            ]

        for rank, results in enumerate(spawn(run, 2, timeout=30)):
            for x, found in zip(views, results, strict=True):
                both = torch.cat([x, x])
                wanted = (both, both.chunk(2, 1)[rank], x + x, (x + x).chunk(2)[rank], x.chunk(2, 1)[rank])
                for result, expected in zip(found, wanted, strict=True):
                    assert torch.equal(result, expected)
                    assert not result.is_conj()
                    assert not result.is_neg()

    def test_placements_may_be_sequences_of_one(self):
        (results,) = run_cases([(chunks(coded((4,)), 0, 2), [Shard(0)], (Replicate(),), None)], 2)
        assert torch.equal(results[1], coded((4,)))


COLLECTIVES = {"allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"} | {
    "alltoall": "all_to_all",
    "post_notes": "exchange",
}


@pytest.fixture
def issued(monkeypatch):
    """The calls of process groups, by the thread that made them."""
    calls = {}
    kind = spawn(lambda ctx: type(ctx.open_group().process_group), 1, timeout=30)[0]
    for method, name in COLLECTIVES.items():
        original = getattr(kind, method)

        def counted(self, *args, _original=original, _name=name, **kw):
            calls.setdefault(threading.get_ident(), []).append(_name)
            return _original(self, *args, **kw)

        monkeypatch.setattr(kind, method, counted)

    return lambda: calls.pop(threading.get_ident(), [])


class TestCommunication:
    def test_what_is_issued_is_what_the_plan_says(self, issued):
        def run(ctx):
            group = ctx.open_group(timeout=20)
            x = coded((4, 4))
            kinds = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")]
            for src in kinds:
                for dst in kinds:
                    for shape in (None, (4, 4) if not src.is_shard() else (12, 4) if src.dim == 0 else (4, 12)):
                        issued()
                        redistribute(x, group, src, dst, shape=shape)
                        plan = plan_redistribution(range(3), [src], [dst])
                        wanted = ["exchange"] if plan.needs_sizes and shape is None else []
                        assert issued() == wanted + [step.kind for step in plan.collectives], (src, dst, shape)

        spawn(run, 3, timeout=60)

    @pytest.mark.parametrize(
        ("src", "dst", "wanted"),
        [
            (Shard(0), Shard(1), ["exchange", "all_to_all"]),
            (Shard(0), Replicate(), ["exchange", "all_gather"]),
            (Shard(0), Partial(), ["exchange"]),
            (Shard(0), Partial("avg"), ["exchange", "all_gather"]),
            (Replicate(), Shard(0), []),
            (Replicate(), Partial(), []),
            (Partial(), Shard(1), ["reduce_scatter"]),
            (Partial(), Replicate(), ["all_reduce"]),
            (Partial(), Partial("max"), ["all_reduce"]),
            (Partial(), Partial(), []),
        ],
        ids=str,
    )
    def test_cell(self, issued, src, dst, wanted):
        def run(ctx):
            group = ctx.open_group(timeout=20)
            issued()
            redistribute(coded((4, 4)), group, src, dst)
            return issued()

        assert spawn(run, 2, timeout=30) == [wanted] * 2

    def test_local_cells_wait_for_nobody(self):
        def run(ctx):
            group = ctx.open_group(timeout=20)
            if ctx.rank == 0:
                x = coded((4, 4))
                for dst in (Shard(0), Shard(-1), Partial(), Partial("avg")):
                    redistribute(x, group, Replicate(), dst)

                for dst in (Partial(), Partial("max")):
                    redistribute(x, group, Shard(0), dst, shape=(8, 4))

                group.send(x, 1)
            else:
                group.recv(0)

        spawn(run, 2, timeout=30)

    def test_group_of_one_never_talks(self, issued):
        def run(ctx):
            group = ctx.open_group(timeout=20)
            issued()
            x = coded((4, 4))
            for src in placements(2, ["sum", "avg"]):
                for dst in placements(2, ["max", "avg"]):
                    assert torch.equal(redistribute(x, group, src, dst), x)

            return issued()

        assert spawn(run, 1, timeout=30) == [[]]
