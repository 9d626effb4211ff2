"""copy_tensor between layouts: same, overlapping and disjoint meshes, and what it must not do."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import Layout, copy_tensor, spawn


def coded(shape, dtype=torch.float32):
    """Every element tells where it is."""
    count = torch.Size(shape).numel()
    return torch.arange(count).reshape(shape).to(dtype)


def dense_part(full, layout, rank):
    """What a rank holds of a layout, by torch.chunk alone; None outside the mesh; a Partial of sum."""
    grid = torch.tensor(layout.mesh)
    found = (grid == rank).nonzero().tolist()
    if not found:
        return None

    part = full
    for size, placement, index in zip(grid.shape, layout.placements, found[0], strict=True):
        if placement.is_shard():
            parts = part.chunk(size, placement.dim)
            part = parts[index] if index < len(parts) else part.narrow(placement.dim, 0, 0)
        elif placement.is_partial() and index:
            part = torch.zeros_like(part)

    return part.clone()


LAYOUTS = [
    Layout([0, 1], [Shard(0)]),
    Layout([0, 1, 2, 3], [Shard(1)]),
    Layout([3, 1, 2], [Shard(0)]),
    Layout([2, 3], [Shard(-1)]),
    Layout([1, 0], [Replicate()]),
    Layout([0, 2, 3], [Partial()]),
    Layout([[0, 1], [2, 3]], [Shard(0), Shard(1)]),
    Layout([[2, 0], [3, 1]], [Shard(0), Shard(0)]),
    Layout([[1, 3]], [Replicate(), Shard(0)]),
    Layout([[0, 1], [2, 3]], [Partial(), Shard(1)]),
    Layout([[3], [2]], [Shard(1), Partial()]),
    Layout([2], [Replicate()]),
]


class TestCopy:
    @pytest.mark.parametrize("shape", [(6, 8), (5, 3), (1, 4), (0, 3)], ids=str)
    def test_every_pair_of_layouts(self, shape):
        full = coded(shape) + 1

        def run(ctx):
            store = ctx.open_store("pairs", timeout=20)
            for src, dst in itertools.product(LAYOUTS, LAYOUTS):
                held = dense_part(full, src, ctx.rank)
                part = copy_tensor(held, store, src, dst)
                expected = dense_part(full, dst, ctx.rank)
                if expected is None:
                    assert part is None
                else:
                    assert torch.equal(part, expected), (src, dst)

        spawn(run, 4, timeout=60)

    def test_0_dim(self):
        def run(ctx):
            store = ctx.open_store("zero", timeout=20)
            held = torch.tensor(2.5) if ctx.rank == 0 else torch.tensor(1.0) if ctx.rank == 1 else None
            return copy_tensor(held, store, Layout([0, 1], [Partial()]), Layout([2, 1], [Replicate()]))

        none, one, two = spawn(run, 3, timeout=30)
        assert none is None
        assert one.item() == two.item() == 3.5
        assert one.shape == ()

    def test_uneven_parts_become_chunks(self):
        cuts = [(0, 1), (1, 1), (1, 7)]

        def run(ctx):
            store = ctx.open_store("uneven", timeout=20)
            full = coded((7, 2))
            held = full[slice(*cuts[ctx.rank])] if ctx.rank < 3 else None
            return copy_tensor(held, store, Layout([0, 1, 2], [Shard(0)]), Layout([3, 0], [Shard(0)]))

        results = spawn(run, 4, timeout=30)
        assert torch.equal(results[3], coded((7, 2))[:4])
        assert torch.equal(results[0], coded((7, 2))[4:])

    def test_equal_layouts_copy_each_part_as_it_is(self):
        layout = Layout([0, 1], [Shard(0)])

        def run(ctx):
            store = ctx.open_store("equal", timeout=20)
            if ctx.rank == 1:
                store.dest_get_to_device("left", "cpu")  # rank 0 has returned

            held = coded((3 - 2 * ctx.rank, 2)) + ctx.rank if ctx.rank < 2 else None
            part = copy_tensor(held, store, layout, Layout(torch.tensor([0, 1]), (Shard(0),)))
            if ctx.rank == 0:
                with store.publish("left", part, 1):
                    pass

            assert part is None or part.data_ptr() != held.data_ptr()
            return part

        zero, one, none = spawn(run, 3, timeout=30)
        assert torch.equal(zero, coded((3, 2)))
        assert torch.equal(one, coded((1, 2)) + 1)
        assert none is None

    def test_mesh_dimension_of_the_same_rank_needs_no_store(self):
        # Replicated on all: each rank cuts what it holds, whoever else is late.
        def run(ctx):
            store = ctx.open_store("local", timeout=20)
            if ctx.rank == 1:
                store.dest_get_to_device("left", "cpu")

            part = copy_tensor(coded((4,)), store, Layout([0, 1], [Replicate()]), Layout([1, 0], [Shard(0)]))
            if ctx.rank == 0:
                with store.publish("left", part, 1):
                    pass

            return part.tolist()

        assert spawn(run, 2, timeout=30) == [[2, 3], [0, 1]]

    def test_results_alias_nothing(self):
        layouts = [Layout([0, 1], [Replicate()]), Layout([2, 1], [Replicate()])]

        def run(ctx):
            store = ctx.open_store("alias", timeout=20)
            held = coded((3,)) if ctx.rank < 2 else None
            part = copy_tensor(held, store, *layouts)
            store.barrier()
            if part is not None:
                part.fill_(-ctx.rank)

            store.barrier()
            return held, part

        (held0, none), (held1, part1), (_, part2) = spawn(run, 3, timeout=30)
        assert none is None
        assert held0.tolist() == held1.tolist() == [0, 1, 2]
        assert part1.tolist() == [-1] * 3
        assert part2.tolist() == [-2] * 3

    def test_many_copies_at_once_in_any_pace(self):
        def run(ctx):
            store = ctx.open_store("many", timeout=20)
            for turn in range(60):
                src, dst = LAYOUTS[turn % len(LAYOUTS)], LAYOUTS[(turn * 5 + 1) % len(LAYOUTS)]
                full = coded((5, 4)) + turn
                part = copy_tensor(dense_part(full, src, ctx.rank), store, src, dst)
                expected = dense_part(full, dst, ctx.rank)
                assert (part is None) == (expected is None)
                assert expected is None or torch.equal(part, expected)

        spawn(run, 4, timeout=60)

    def test_cpu_device_is_taken(self):
        def run(ctx):
            store = ctx.open_store("device", timeout=20)
            src = Layout([0], [Replicate()], device="cpu")
            return copy_tensor(coded((2,)) if ctx.rank == 0 else None, store, src, Layout([1], [Shard(0)], "cpu"))

        assert spawn(run, 2, timeout=30)[1].device.type == "cpu"
