"""scatter_tensor against a dense oracle."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import dtorch_core
from dtorch_core import scatter_tensor, spawn

SHAPES = [(8, 6), (5, 7), (3, 1), (0, 4), (2, 0), (1, 1)]
MESHES = [[0, 1], [2, 0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[2, 3]], [1]]


def coded(shape, dtype=torch.float32):
    """Every element tells where it is."""
    count = torch.Size(shape).numel()
    return torch.arange(count).reshape(shape).to(dtype)


def dense_part(full, sizes, placements, place):
    """What the place holds, by torch.chunk alone; a Partial of sum."""
    part = full
    for size, placement, index in zip(sizes, placements, place, strict=True):
        if placement.is_shard():
            parts = part.chunk(size, placement.dim)
            part = parts[index] if index < len(parts) else part.narrow(placement.dim, 0, 0)
        elif placement.is_partial() and index:
            part = torch.zeros_like(part)

    return part


def layouts(mesh):
    """The sizes of a mesh, its places by rank, and placements for it."""
    grid = torch.tensor(mesh)
    places = {int(grid[tuple(place)]): tuple(place) for place in torch.ones(grid.shape).nonzero().tolist()}
    if grid.ndim == 1:
        choices = [[Shard(0)], [Shard(1)], [Shard(-1)], [Replicate()], [Partial()]]
    else:
        choices = [
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [Shard(0), Shard(0)],
            [Shard(-1), Shard(1)],
            [Shard(0), Replicate()],
            [Replicate(), Shard(1)],
            [Partial(), Shard(0)],
            [Partial(), Partial()],
            [Replicate(), Replicate()],
        ]

    return tuple(grid.shape), places, choices


class TestScatter:
    def test_parts_match_torch_chunk(self):
        def run(ctx):
            store = ctx.open_store("scatter", timeout=20)
            for mesh in MESHES:
                sizes, places, choices = layouts(mesh)
                for shape in SHAPES:
                    for src, placements in enumerate(choices):
                        full = coded(shape) + 1
                        part = scatter_tensor(
                            full if ctx.rank == src % 4 else None, store, mesh, placements, src=src % 4
                        )
                        if ctx.rank not in places:
                            assert part is None
                            continue

                        expected = dense_part(full, sizes, placements, places[ctx.rank])
                        assert torch.equal(part, expected), (mesh, shape, placements)
                        assert part.shape == expected.shape
                        assert part.is_contiguous()

        spawn(run, 4, timeout=60)

    def test_0_dim_tensor_is_replicated(self):
        def run(ctx):
            store = ctx.open_store("zero", timeout=20)
            full = torch.tensor(7.5)
            whole = scatter_tensor(full if ctx.rank == 1 else None, store, [0, 1, 2], [Replicate()], src=1)
            partial = scatter_tensor(full if ctx.rank == 1 else None, store, [2, 1, 0], [Partial("max")], src=1)
            return whole, partial

        results = spawn(run, 3, timeout=30)
        assert [float(whole) for whole, _ in results] == [7.5] * 3
        assert all(whole.shape == () for whole, _ in results)
        assert [float(partial) for _, partial in results] == [float("-inf")] * 2 + [7.5]

    def test_mesh_may_be_a_tensor_or_have_the_attributes_of_a_device_mesh(self):
        class Stub:
            mesh = torch.tensor([[1, 0]], dtype=torch.int32)
            mesh_dim_names = ("dp", "tp")

        def run(ctx):
            store = ctx.open_store("meshes", timeout=20)
            full = coded((5, 2)) if ctx.rank == 0 else None
            parts = [
                scatter_tensor(full, store, torch.tensor([1, 0]), [Shard(0)], src=0),
                scatter_tensor(full, store, Stub, [Replicate(), Shard(0)], src=0),
                scatter_tensor(full, store, ((1, 0),), (Replicate(), Shard(0)), src=0),
                scatter_tensor(full, store, range(2), [Shard(0)], src=0),
            ]
            return [part[:, 0].tolist() for part in parts]

        low, high = [0.0, 2.0, 4.0], [6.0, 8.0]
        assert spawn(run, 2, timeout=30) == [[high, high, high, low], [low, low, low, high]]

    def test_neutral_elements_by_op_and_dtype(self):
        cases = [
            ("sum", torch.float32, 0),
            ("product", torch.int16, 1),
            ("min", torch.int8, 127),
            ("max", torch.int8, -128),
            ("min", torch.uint8, 255),
            ("max", torch.uint8, 0),
            ("min", torch.bfloat16, float("inf")),
            ("max", torch.float64, float("-inf")),
            ("band", torch.int32, -1),
            ("band", torch.bool, True),
            ("bor", torch.int64, 0),
            ("bxor", torch.uint8, 0),
            ("product", torch.complex64, 1),
            ("min", torch.bool, True),
        ]

        def run(ctx):
            store = ctx.open_store("neutral", timeout=20)
            for op, dtype, neutral in cases:
                full = coded((2, 3), dtype)
                part = scatter_tensor(full if ctx.rank == 0 else None, store, [1, 2, 0], [Partial(op)], src=0)
                expected = full if ctx.rank == 1 else torch.full((2, 3), neutral, dtype=dtype)
                assert part.dtype == dtype
                assert torch.equal(part, expected), (op, dtype)

        spawn(run, 3, timeout=30)

    def test_partial_avg_is_the_value_everywhere(self):
        def run(ctx):
            store = ctx.open_store("avg", timeout=20)
            full = coded((3,), torch.int8) + 100
            return scatter_tensor(full if ctx.rank == 2 else None, store, [0, 1], [Partial("avg")], src=2)

        first, second, none = spawn(run, 3, timeout=30)
        assert first.tolist() == second.tolist() == [100, 101, 102]
        assert none is None


class TestValues:
    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
    def test_every_dtype_travels(self):
        dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
        dtypes += [torch.uint16, torch.uint32, torch.uint64]
        dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
        dtypes += [torch.complex32, torch.complex64, torch.complex128]
        dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]

        def run(ctx):
            store = ctx.open_store("dtypes", timeout=20)
            for dtype in dtypes:
                full = coded((3, 4)).to(dtype)
                part = scatter_tensor(full if ctx.rank == 0 else None, store, [0, 1], [Shard(1)], src=0)
                assert part.dtype == dtype
                # Compared as bytes: torch can't compare every dtype.
                expected = full.chunk(2, 1)[ctx.rank].contiguous().view(torch.uint8)
                assert torch.equal(part.view(torch.uint8), expected), dtype

        spawn(run, 2, timeout=30)

    def test_views_keep_their_values(self):
        base = torch.arange(24.0).reshape(4, 6)
        views = [
            base.t(),
            base[::2, 1::2],
            base[0].expand(5, 6),
            torch.complex(base, base + 1).conj(),
            torch._neg_view(base),
            base.flip(0),
            base.permute(1, 0)[1:],
        ]

        def run(ctx):
            store = ctx.open_store("views", timeout=20)
            for full in views:
                part = scatter_tensor(full if ctx.rank == 0 else None, store, [0, 1], [Shard(0)], src=0)
                assert torch.equal(part, full.chunk(2)[ctx.rank].resolve_conj().resolve_neg())
                assert not part.is_conj()
                assert not part.is_neg()

        spawn(run, 2, timeout=30)

    def test_results_are_detached_and_owned(self):
        full = torch.nn.Parameter(coded((4, 2)))
        met = []

        def run(ctx):
            store = ctx.open_store("owned", timeout=20)
            shard = scatter_tensor(full if ctx.rank == 0 else None, store, [0, 1], [Shard(0)], src=0)
            copy = scatter_tensor(full if ctx.rank == 0 else None, store, [0, 1], [Replicate()], src=0)
            met.append(shard.requires_grad or copy.requires_grad)
            store.barrier()
            shard.fill_(-1 - ctx.rank)
            copy.fill_(-1 - ctx.rank)
            store.barrier()
            return shard, copy

        results = spawn(run, 2, timeout=30)
        assert met == [False, False]
        assert torch.equal(full.detach(), coded((4, 2)))
        for rank, (shard, copy) in enumerate(results):
            assert torch.all(shard == -1 - rank)
            assert torch.all(copy == -1 - rank)
            assert shard.untyped_storage().nbytes() == shard.numel() * 4

    def test_source_may_be_written_once_the_call_returns(self):
        def run(ctx):
            store = ctx.open_store("reuse", timeout=20)
            full = torch.zeros(300, 100)
            for turn in range(20):
                if ctx.rank == 0:
                    full.copy_(coded((300, 100)) + turn)

                part = scatter_tensor(full if ctx.rank == 0 else None, store, [1, 2], [Shard(0)], src=0)
                if ctx.rank:
                    assert torch.equal(part, (coded((300, 100)) + turn).chunk(2)[ctx.rank - 1])

        spawn(run, 3, timeout=30)


class TestWaiting:
    def test_late_rank_delays_only_those_who_need_it(self):
        def run(ctx):
            store = ctx.open_store("late", timeout=20)
            full = coded((4, 2))
            if ctx.rank == 2:
                # Rank 1 says that it has its part before rank 2 so much as calls.
                assert torch.equal(store.dest_get_to_device("served", "cpu"), full[:2])

            part = scatter_tensor(full if ctx.rank == 0 else None, store, [1, 2], [Shard(0)], src=0)
            if ctx.rank == 1:
                store.src_set("served", part, 1)
                store.src_wait_until_get_finished("served")

        spawn(run, 3, timeout=30)

    def test_rank_outside_the_mesh_returns_at_once(self):
        def run(ctx):
            store = ctx.open_store("outside", timeout=20)
            full = coded((4,))
            if ctx.rank == 0:
                store.dest_get_to_device("left", "cpu")

            part = scatter_tensor(full if ctx.rank == 0 else None, store, [0, 1], [Shard(0)], src=0)
            if ctx.rank == 2:
                assert part is None
                with store.publish("left", full, 1):
                    pass

        spawn(run, 3, timeout=30)

    def test_each_region_is_published_once_for_all_its_readers(self):
        published = []

        def run(ctx):
            store = ctx.open_store("once", timeout=20)
            plain = store.src_set

            def counted(key, tensor, get_count, **kw):
                if tensor.dtype == torch.float32:
                    published.append((ctx.rank, tuple(tensor.shape), get_count, tensor.data_ptr()))

                plain(key, tensor, get_count, **kw)

            store.src_set = counted
            full = coded((6, 2))
            scatter_tensor(full if ctx.rank == 0 else None, store, [[0, 1], [2, 3]], [Shard(0), Replicate()], src=0)
            return full.data_ptr()

        address = spawn(run, 4, timeout=30)[0]
        # Rank 0 copies its own rows itself; its views are published, not copies of them.
        assert sorted(published) == [(0, (3, 2), 1, address), (0, (3, 2), 2, address + 24)]


def test_package_offers_its_names():
    assert dtorch_core.scatter_tensor is scatter_tensor
    assert set(dtorch_core.placement.__all__) >= {"Layout", "copy_tensor", "gather_tensor", "scatter_tensor"}
