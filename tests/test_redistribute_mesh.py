"""redistribute_mesh: several mesh dimensions at once, against a dense oracle."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import plan_redistribution, redistribute_mesh, spawn
from dtorch_core.reduction import rule

OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
BITS = ("band", "bor", "bxor")


def coded(shape, dtype=torch.int64):
    """Every element tells where it is."""
    return (torch.arange(torch.Size(shape).numel()) % 59 + 1).reshape(shape).to(dtype)


def cutters(layout, sizes, dim, ndim):
    """The mesh dimensions that cut a tensor dimension, outermost first. One of a single rank cuts nothing."""
    cuts = [p.is_shard() and p.dim % ndim == dim and size > 1 for p, size in zip(layout, sizes, strict=True)]
    return [number for number, here in enumerate(cuts) if here]


def halves(indices, parts):
    """What torch.chunk makes of a run of indices."""
    size = -(-len(indices) // parts)
    return [indices[size * part : size * (part + 1)] for part in range(parts)]


def cut_anywhere(indices, parts, rng):
    """Runs of random sizes, some empty."""
    points = sorted(rng.randint(0, len(indices)) for _ in range(parts - 1))
    return [indices[a:b] for a, b in zip([0, *points], [*points, len(indices)], strict=True)]


class Cuts:
    """Which indices of each tensor dimension each place holds: of a source cut anywhere, and of what follows it."""

    def __init__(self, shape, sizes, source, rng=None):
        self.shape, self.sizes, self.source = shape, sizes, source
        self.tables = []
        for dim, size in enumerate(shape):
            table, level = {(): list(range(size))}, [()]
            for number in cutters(source, sizes, dim, len(shape)):
                for place in level:
                    cut = cut_anywhere if rng else lambda indices, parts, _: halves(indices, parts)
                    for index, part in enumerate(cut(table[place], sizes[number], rng)):
                        table[*place, index] = part

                level = [(*place, index) for place in level for index in range(sizes[number])]

            self.tables.append(table)

    def indices(self, layout, place, dim):
        """What ``place`` holds: cuts that go on as in the source keep their sizes, the others are torch.chunk's."""
        now, before = (cutters(one, self.sizes, dim, len(self.shape)) for one in (layout, self.source))
        kept = 0
        while kept < min(len(now), len(before)) and now[kept] == before[kept]:
            kept += 1

        held = self.tables[dim][tuple(place[number] for number in now[:kept])]
        for number in now[kept:]:
            held = halves(held, self.sizes[number])[place[number]]

        return held

    def part(self, full, layout, place):
        """The dense piece."""
        for dim in range(full.ndim):
            full = full.index_select(dim, torch.tensor(self.indices(layout, place, dim), dtype=torch.int64))

        return full


def term(part, op, number, count):
    """Contribution ``number`` of ``count``, all different, whose reduction is ``part``."""
    noise = [(torch.arange(part.numel()).reshape(part.shape) + n).to(part.dtype) % 5 for n in range(1, count)]
    if number and op == "product":
        return 1 - 2 * (noise[number - 1] % 2)

    if number:
        n = noise[number - 1]
        return {"sum": n, "avg": part + n, "min": part + n, "max": part - n}.get(op, n) if op not in BITS else {
            "band": part | n,
            "bor": part & n,
            "bxor": n,
        }[op]

    for n in noise:
        part = {"sum": part - n, "avg": part - n, "product": part * (1 - 2 * (n % 2))}.get(op, part)
        part = part ^ n if op == "bxor" else part

    return part


def source_part(full, cuts, layout, place):
    """What the rank at ``place`` holds before."""
    part = cuts.part(full, layout, place)
    partial = [(size, index) for size, index, p in zip(cuts.sizes, place, layout, strict=True) if p.is_partial()]
    count, number = 1, 0
    for size, index in partial:
        count, number = count * size, number * size + index

    op = next((p.reduce_op for p in layout if p.is_partial()), "")
    return term(part, op, number, count) if op else part


def places(sizes):
    return list(itertools.product(*map(range, sizes)))


def check(results, full, cuts, layout, what):
    """``results`` by place are ``full`` in ``layout``."""
    op = next((p.reduce_op for p in layout if p.is_partial()), None)
    groups = {}
    for place, result in results.items():
        wanted = cuts.part(full, layout, place)
        assert result.dtype == full.dtype, what
        assert result.is_contiguous(), what
        assert result.untyped_storage().nbytes() == result.nbytes, what
        assert result.shape == wanted.shape, (what, place, result.shape, wanted.shape)
        if op is None:
            assert torch.equal(result, wanted), (what, place, result, wanted)

        groups.setdefault(
            tuple(0 if p.is_partial() else index for p, index in zip(layout, place, strict=True)), []
        ).append(result)

    if op is not None:
        for place, terms in groups.items():
            out = torch.empty_like(terms[0])
            rule(op, out.dtype).into(out, [t.clone() for t in terms])
            assert torch.equal(out, cuts.part(full, layout, place)), (what, place, out)


def mesh_of(sizes, ranks):
    return torch.tensor(ranks).reshape(sizes).tolist()


def run_cases(cases, world_size):
    """Run cases on ranks; by case the results by place."""

    def run(ctx):
        manager = ctx.open_manager(timeout=30)
        results = []
        for full, cuts, sizes, ranks, src, dst, shape in cases:
            x = None
            if ctx.rank in ranks:
                x = source_part(full, cuts, src, places(sizes)[ranks.index(ctx.rank)])

            before = None if x is None else x.clone()
            results.append(redistribute_mesh(x, manager, mesh_of(sizes, ranks), src, dst, shape=shape))
            assert x is None or torch.equal(x, before)

        return results

    by_rank = spawn(run, world_size, timeout=200)
    for number, (_, _, sizes, ranks, *_) in enumerate(cases):
        assert all(by_rank[rank][number] is None for rank in range(world_size) if rank not in ranks)
        yield {place: by_rank[rank][number] for place, rank in zip(places(sizes), ranks, strict=True)}


def verify(cases, world_size):
    for results, (full, cuts, sizes, ranks, src, dst, shape) in zip(run_cases(cases, world_size), cases, strict=True):
        check(results, full, cuts, dst, (sizes, ranks, src, dst, list(full.shape), shape is not None))


class TestNestedShards:
    @pytest.mark.parametrize("size", [0, 1, 3, 5, 8, 9])
    def test_all_pairs_of_layouts_of_a_two_by_two_mesh(self, size):
        shape, sizes = (size, 5), (2, 2)
        kinds = [Replicate(), Shard(0), Shard(-1), Partial()]
        cases = []
        for src, dst in itertools.product(itertools.product(kinds, repeat=2), repeat=2):
            cases.append((coded(shape), Cuts(shape, sizes, src), sizes, [2, 0, 3, 1], src, dst, None))

        verify(cases, 4)

    @pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3)], ids=str)
    def test_uneven_nested_shards(self, sizes):
        rng, shape = random.Random(1), (11, 4)
        layouts = [(Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(1), Shard(0))]
        layouts += [(Replicate(), Replicate()), (Partial(), Shard(0)), (Shard(0), Partial())]
        ranks = list(range(sizes[0] * sizes[1]))
        cases = [
            (coded(shape), Cuts(shape, sizes, src, rng), sizes, ranks, src, dst, None)
            for src, dst in itertools.product(layouts, repeat=2)
        ]
        verify(cases, len(ranks))

    def test_kept_cut_keeps_its_sizes(self):
        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            full, (row, column) = coded((7, 4)), divmod(ctx.rank, 2)
            x = full[[slice(0, 6), slice(6, 7)][row]].chunk(2, 1)[column]
            src = [Shard(0), Shard(1)]
            gathered = redistribute_mesh(x, manager, [[0, 1], [2, 3]], src, [Shard(0), Replicate()])
            finer = redistribute_mesh(x, manager, [[0, 1], [2, 3]], src, [Shard(0), Shard(0)])
            anew = redistribute_mesh(x, manager, [[0, 1], [2, 3]], src, [Shard(1), Shard(0)])
            return [tuple(t.shape) for t in (gathered, finer, anew)]

        shapes = list(zip(*spawn(run, 4, timeout=30), strict=True))
        assert shapes[0] == ((6, 4), (6, 4), (1, 4), (1, 4))
        assert shapes[1] == ((3, 4), (3, 4), (1, 4), (0, 4))
        assert shapes[2] == ((4, 2), (3, 2), (4, 2), (3, 2))


class TestPartials:
    @pytest.mark.parametrize("op", OPS)
    def test_all_pairs_with_one_op(self, op):
        shape, sizes = (5, 3), (2, 2)
        other = OPS[OPS.index(op) - 1]
        kinds = [Replicate(), Shard(0), Partial(op)]
        cases = []
        for src, dst in itertools.product(itertools.product(kinds, repeat=2), repeat=2):
            for target in {dst, tuple(Partial(other) if p.is_partial() else p for p in dst)}:
                cases.append((coded(shape), Cuts(shape, sizes, src), sizes, [0, 1, 2, 3], src, target, shape))

        verify(cases, 4)

    def test_means_are_taken_at_once(self):
        # Flat: 1 + 2 + 3 + 5 = 11, and 11 / 4 truncates to 2. Of means it would be 1 and 4, and then 5 / 2.
        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            x = torch.tensor([[1, 2, 3, 9][ctx.rank]])
            mesh, mean = [[0, 1], [2, 3]], [Partial("avg"), Partial("avg")]
            one = redistribute_mesh(x, manager, mesh, mean, [Replicate(), Partial("avg")])
            both = redistribute_mesh(x, manager, mesh, mean, [Replicate(), Replicate()])
            return one.item(), both.item()

        assert spawn(run, 4, timeout=30) == [(3, 3)] * 4

    def test_half_precision_is_rounded_once(self):
        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            x = torch.tensor([[2048.0, 1.0, 1.0, 1.0][ctx.rank]], dtype=torch.float16)
            return redistribute_mesh(x, manager, [[0, 1], [2, 3]], [Partial(), Partial()], [Replicate(), Shard(0)])

        assert spawn(run, 4, timeout=30)[0].item() == torch.tensor(2051.0).to(torch.float16).item() > 2048

    def test_reduction_goes_in_mesh_order(self):
        values = [1e20, 3.0, -1e20, 0.0]

        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            x, both = torch.tensor([values[ctx.rank]]), [Partial(), Partial()]
            first = redistribute_mesh(x, manager, [[0, 2], [1, 3]], both, [Replicate(), Replicate()])
            second = redistribute_mesh(x, manager, [[0, 1], [2, 3]], both, [Replicate(), Replicate()])
            return first.item(), second.item()

        assert spawn(run, 4, timeout=30) == [(3.0, 0.0)] * 4


class TestMeshes:
    def test_ranks_outside_pass_and_get_none(self):
        shape, sizes = (5, 4), (1, 3)
        src, dst = (Replicate(), Shard(0)), (Shard(1), Replicate())
        verify([(coded(shape), Cuts(shape, sizes, src), sizes, [3, 0, 2], src, dst, None)], 4)

    def test_mesh_dimensions_of_one_rank(self):
        shape, sizes = (5, 4), (1, 2, 1)
        kinds = [Replicate(), Shard(0), Partial()]
        cases = [
            (coded(shape), Cuts(shape, sizes, src), sizes, [1, 0], src, dst, None)
            for src, dst in itertools.product(itertools.product(kinds, repeat=3), repeat=2)
        ]
        verify(cases[::7], 2)

    def test_tensor_and_device_mesh_like(self):
        class Named:
            mesh = torch.tensor([[0, 1], [2, 3]])
            mesh_dim_names = ("dp", "tp")

        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            x = coded((4, 4))
            one = redistribute_mesh(x, manager, Named(), [Shard(0), Replicate()], [Replicate(), Replicate()])
            two = redistribute_mesh(x, manager, Named.mesh, [Shard(0), Replicate()], [Replicate(), Replicate()])
            return one, two

        for one, two in spawn(run, 4, timeout=30):
            assert torch.equal(one, coded((4, 4)).repeat(2, 1))
            assert torch.equal(two, one)

    def test_itself_is_the_same_tensor(self):
        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            x = coded((3 + ctx.rank, 2))
            same = [Shard(0), Partial(), Replicate()]
            assert redistribute_mesh(x, manager, [[[0], [1]]], same, list(same)) is x
            changed = redistribute_mesh(x, manager, [[[0], [1]]], same, [Replicate(), Partial(), Shard(0)])
            assert changed is not x
            assert torch.equal(changed, x)

        spawn(run, 2, timeout=30)


MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 1, 2), (1, 3), (2, 1), (1, 2, 2)]


def random_case(rng, world_size, meshes):
    """A conversion that may be anything."""
    sizes = rng.choice([sizes for sizes in meshes if torch.Size(sizes).numel() <= world_size])
    ranks = rng.sample(range(world_size), torch.Size(sizes).numel())
    shape = [rng.choice([0, 1, 2, 3, 5, 6, 7]) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    layouts = []
    for _ in range(2):
        op = rng.choice(OPS)
        kinds = [Replicate(), Partial(op)] + [Shard(dim) for dim in range(-len(shape), len(shape))] * 2
        layouts.append(tuple(rng.choice(kinds) for _ in sizes))

    known = rng.random() < 0.3
    cuts = Cuts(shape, sizes, layouts[0], None if known else rng)
    dtype = rng.choice([torch.int64, torch.int32, torch.int16])
    return (coded(shape, dtype), cuts, sizes, ranks, *layouts, shape if known else None)


class TestRandomLayouts:
    @pytest.mark.parametrize("seed", range(3))
    def test_four_ranks(self, seed):
        rng = random.Random(seed)
        verify([random_case(rng, 4, MESHES) for _ in range(150)], 4)

    @pytest.mark.parametrize("seed", range(2))
    def test_six_and_eight_ranks(self, seed):
        rng = random.Random(seed)
        verify([random_case(rng, 8, [(3, 2), (2, 3), (2, 2, 2), (2, 4)]) for _ in range(60)], 8)


class TestCommunication:
    def test_what_is_issued_is_what_the_plan_says(self, monkeypatch):
        calls = {}
        kind = spawn(lambda ctx: type(ctx.open_group().process_group), 1, timeout=30)[0]
        names = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
        for method, name in {**names, "reduce_scatter": "reduce_scatter", "post_notes": "exchange"}.items():
            original = getattr(kind, method)

            def counted(self, *args, _original=original, _name=name, **kw):
                calls.setdefault(threading.get_ident(), []).append(_name)
                return _original(self, *args, **kw)

            monkeypatch.setattr(kind, method, counted)

        kinds = [Replicate(), Shard(0), Shard(1), Partial()]
        pairs = list(itertools.product(itertools.product(kinds, repeat=2), repeat=2))

        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            mesh, cuts_of = [[0, 1], [2, 3]], places((2, 2))
            for src, dst in pairs:
                for shape in (None, (6, 5)):
                    x = source_part(coded((6, 5)), Cuts((6, 5), (2, 2), src), src, cuts_of[ctx.rank])
                    calls.pop(threading.get_ident(), None)
                    redistribute_mesh(x, manager, mesh, src, dst, shape=shape)
                    plan = plan_redistribution(mesh, src, dst)
                    exchange = ["exchange"] if plan.needs_sizes and shape is None else []
                    issued = calls.pop(threading.get_ident(), [])
                    assert issued == exchange + [step.kind for step in plan.collectives], (src, dst, shape)

        spawn(run, 4, timeout=60)
