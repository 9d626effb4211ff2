"""gather_tensor against a dense oracle."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import gather_tensor, spawn


def coded(shape, dtype=torch.float32):
    """Every element tells where it is."""
    count = torch.Size(shape).numel()
    return torch.arange(count).reshape(shape).to(dtype)


class TestGather:
    @pytest.mark.parametrize("dst", [0, 2, 3])
    def test_chunks_make_the_whole(self, dst):
        shapes = [(8, 6), (5, 7), (1, 3), (0, 4), (2, 0)]
        cases = [
            ([0, 1, 2], [Shard(0)], lambda full, i: (full.chunk(3), i)),
            ([2, 0, 1], [Shard(-1)], lambda full, i: (full.chunk(3, 1), i)),
            ([1], [Shard(1)], lambda full, i: ([full], i)),
        ]

        def run(ctx):
            store = ctx.open_store("chunks", timeout=20)
            for shape in shapes:
                for mesh, placements, cut in cases:
                    full = coded(shape) + 1
                    local = None
                    if ctx.rank in mesh:
                        parts, index = cut(full, mesh.index(ctx.rank))
                        dim = placements[0].dim
                        local = parts[index] if index < len(parts) else full.narrow(dim, 0, 0)

                    whole = gather_tensor(local, store, mesh, placements, dst=dst)
                    if ctx.rank == dst:
                        assert torch.equal(whole, full), (shape, mesh, placements)
                        assert whole.is_contiguous()
                    else:
                        assert whole is None

        spawn(run, 4, timeout=60)

    def test_two_mesh_dimensions_on_one_tensor_dimension(self):
        def run(ctx):
            store = ctx.open_store("nested", timeout=20)
            full = coded((7, 2))
            mesh = [[3, 0], [1, 2]]
            row, column = next((r, c) for r in range(2) for c in range(2) if mesh[r][c] == ctx.rank)
            local = full.chunk(2)[row].chunk(2)[column]
            return gather_tensor(local, store, mesh, [Shard(0), Shard(0)], dst=1)

        results = spawn(run, 4, timeout=30)
        assert torch.equal(results[1], coded((7, 2)))

    def test_any_sizes_that_fit_together(self):
        rows, columns = [(0, 3), (3, 3), (3, 8)], [(0, 1), (1, 6)]

        def run(ctx):
            store = ctx.open_store("sizes", timeout=20)
            full = coded((8, 6))
            first = full[slice(*rows[ctx.rank])] if ctx.rank < 3 else None
            uneven = gather_tensor(first, store, [0, 1, 2], [Shard(0)], dst=3)
            # The 2x2 grid, and a dimension cut by both mesh dimensions into parts of 1, 4, 0 and 3.
            grid = full[slice(*rows[ctx.rank // 2 * 2])][:, slice(*columns[ctx.rank % 2])]
            crossed = gather_tensor(grid, store, [[0, 1], [2, 3]], [Shard(0), Shard(1)], dst=0)
            start, stop = [(0, 1), (1, 5), (5, 5), (5, 8)][ctx.rank]
            twice = gather_tensor(full[start:stop], store, [[0, 1], [2, 3]], [Shard(0), Shard(0)], dst=2)
            return uneven, crossed, twice

        results = spawn(run, 4, timeout=30)
        assert torch.equal(results[3][0], coded((8, 6)))
        assert torch.equal(results[0][1], coded((8, 6)))
        assert torch.equal(results[2][2], coded((8, 6)))

    def test_of_equal_parts_the_receivers_own_is_taken(self):
        def run(ctx):
            store = ctx.open_store("own", timeout=20)
            local = coded((3, 2)) + 100 * ctx.rank
            return gather_tensor(local, store, [0, 1, 2], [Replicate()], dst=1)

        results = spawn(run, 3, timeout=30)
        assert torch.equal(results[1], coded((3, 2)) + 100)
        assert results[0] is None
        assert results[2] is None

    def test_strided_conjugate_and_differentiable_parts(self):
        def run(ctx):
            store = ctx.open_store("views", timeout=20)
            base = torch.complex(coded((4, 6)), coded((4, 6)) + 1).requires_grad_()
            local = base.t()[3 * ctx.rank : 3 * ctx.rank + 3].conj()
            return gather_tensor(local, store, [0, 1], [Shard(0)], dst=0)

        whole = spawn(run, 2, timeout=30)[0]
        assert torch.equal(whole, torch.complex(coded((4, 6)), -coded((4, 6)) - 1).t())
        assert not whole.requires_grad
        assert not whole.is_conj()


class TestWaiting:
    def test_rank_whose_part_is_not_needed_returns_at_once(self):
        def run(ctx):
            store = ctx.open_store("replica", timeout=20)
            if ctx.rank == 1:
                store.dest_get_to_device("left", "cpu")

            local = coded((2,)) + ctx.rank // 2
            whole = gather_tensor(local, store, [[0, 1], [2, 3]], [Shard(0), Replicate()], dst=1)
            if ctx.rank == 3:
                with store.publish("left", local, 1):
                    pass

            return whole

        assert spawn(run, 4, timeout=30)[1].tolist() == [0, 1, 1, 2]

    def test_receiver_outside_the_mesh(self):
        def run(ctx):
            store = ctx.open_store("outside", timeout=20)
            local = coded((2, 2)) + 4 * ctx.rank if ctx.rank < 2 else None
            return gather_tensor(local, store, [0, 1], [Shard(0)], dst=2)

        results = spawn(run, 3, timeout=30)
        assert torch.equal(results[2], coded((4, 2)))
        assert results[0] is None


class TestPartial:
    @pytest.mark.parametrize(
        ("op", "dtype", "expected"),
        [
            ("sum", torch.int64, lambda x: x[0] + x[1] + x[2]),
            ("sum", torch.uint16, lambda x: x[0] + x[1] + x[2]),
            ("product", torch.int32, lambda x: x[0] * x[1] * x[2]),
            ("product", torch.float64, lambda x: x[0] * x[1] * x[2]),
            ("min", torch.int8, lambda x: torch.stack(x).amin(0)),
            ("max", torch.float32, lambda x: torch.stack(x).amax(0)),
            ("avg", torch.float64, lambda x: (x[0] + x[1] + x[2]) / 3),
            ("band", torch.uint8, lambda x: x[0] & x[1] & x[2]),
            ("bor", torch.int16, lambda x: x[0] | x[1] | x[2]),
            ("bxor", torch.int64, lambda x: x[0] ^ x[1] ^ x[2]),
            ("sum", torch.complex64, lambda x: x[0] + x[1] + x[2]),
        ],
    )
    def test_op(self, op, dtype, expected):
        wide = torch.int64 if not dtype.is_floating_point and not dtype.is_complex else dtype
        parts = [(coded((3, 3), wide) + 1) * (rank + 1) for rank in range(3)]

        def run(ctx):
            store = ctx.open_store("op", timeout=20)
            return gather_tensor(parts[ctx.rank].to(dtype), store, [2, 0, 1], [Partial(op)], dst=1)

        whole = spawn(run, 3, timeout=30)[1]
        assert whole.dtype == dtype
        assert torch.equal(whole.to(wide), expected(parts))

    def test_integer_avg_truncates_toward_zero(self):
        def run(ctx):
            store = ctx.open_store("trunc", timeout=20)
            parts = [torch.tensor([-7, 7, -1, 100], dtype=torch.int8), torch.tensor([0, 0, 0, 101], dtype=torch.int8)]
            return gather_tensor(parts[ctx.rank], store, [0, 1], [Partial("avg")], dst=0)

        assert spawn(run, 2, timeout=30)[0].tolist() == [-3, 3, 0, 100]

    def test_sum_of_bool_is_or(self):
        def run(ctx):
            store = ctx.open_store("or", timeout=20)
            parts = [torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])]
            return gather_tensor(parts[ctx.rank], store, [0, 1], [Partial()], dst=0)

        assert spawn(run, 2, timeout=30)[0].tolist() == [True, True, True, False]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_rounded_once(self, dtype):
        big = 2048.0 if dtype is torch.float16 else 256.0

        def run(ctx):
            store = ctx.open_store("half", timeout=20)
            # 1 is half a unit in the last place of ``big``: added one at a time in ``dtype``, each is lost.
            values = [big, 1.0, 1.0, 1.0]
            return gather_tensor(torch.tensor([values[ctx.rank]], dtype=dtype), store, [0, 1, 2, 3], [Partial()], dst=3)

        assert spawn(run, 4, timeout=30)[3].item() == torch.tensor(big + 3).to(dtype).item() > big

    def test_reduction_goes_in_mesh_order(self):
        parts = [torch.tensor([1e20]), torch.tensor([-1e20]), torch.tensor([3.0])]

        def run(ctx):
            store = ctx.open_store("order", timeout=20)
            first = gather_tensor(parts[ctx.rank], store, [0, 1, 2], [Partial()], dst=2)
            second = gather_tensor(parts[ctx.rank], store, [0, 2, 1], [Partial()], dst=2)
            return first, second

        first, second = spawn(run, 3, timeout=30)[2]
        assert (first.item(), second.item()) == (3.0, 0.0)

    def test_partial_beside_shard_and_over_two_dimensions(self):
        def run(ctx):
            store = ctx.open_store("beside", timeout=20)
            full = coded((5, 2))
            row, column = divmod(ctx.rank, 2)
            shard = full.chunk(2)[column] * (row + 1)
            beside = gather_tensor(shard, store, [[0, 1], [2, 3]], [Partial(), Shard(0)], dst=0)
            # Flat over both dimensions: 1 + 2 + 3 + 5 = 11, and 11 / 4 truncates to 2; of means it would be 1 + 4 = 5.
            value = torch.tensor([[1, 2, 3, 5][ctx.rank]])
            mean = gather_tensor(value, store, [[0, 1], [2, 3]], [Partial("avg"), Partial("avg")], dst=0)
            return beside, mean

        beside, mean = spawn(run, 4, timeout=30)[0]
        assert torch.equal(beside, coded((5, 2)) * 3)
        assert mean.item() == 2

    def test_parts_are_not_changed(self):
        def run(ctx):
            store = ctx.open_store("kept", timeout=20)
            local = coded((4,)) + ctx.rank
            gather_tensor(local, store, [0, 1], [Partial()], dst=0)
            return local

        for rank, local in enumerate(spawn(run, 2, timeout=30)):
            assert torch.equal(local, coded((4,)) + rank)
