"""A few hundred random conversions, equal on every rank by one seed, against a dense oracle."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import Layout, copy_tensor, gather_tensor, scatter_tensor, spawn

WORLD = 4
DTYPES = [torch.float64, torch.int64, torch.float32, torch.int16, torch.bfloat16]


def random_layout(rng, ndim, op):
    """A mesh of some of the ranks, with placements that a tensor of ``ndim`` dimensions can have."""
    sizes = rng.choice([(1,), (2,), (3,), (4,), (2, 2), (1, 3), (2, 1), (1, 2, 2)])
    ranks = rng.sample(range(WORLD), torch.Size(sizes).numel())
    kinds = [Replicate(), Partial(op)] + [Shard(dim) for dim in range(-ndim, ndim)] * 2
    return Layout(torch.tensor(ranks).reshape(sizes).tolist(), [rng.choice(kinds) for _ in sizes])


def cut(size, parts, rng):
    """Intervals of random sizes, some empty."""
    points = sorted(rng.randint(0, size) for _ in range(parts - 1))
    return list(zip([0, *points], [*points, size], strict=True))


def nested_chunks(size, counts):
    """What torch.chunk makes of each part in turn."""
    pieces = [torch.arange(size)]
    for count in counts:
        finer = []
        for piece in pieces:
            chunks = list(piece.chunk(count))
            finer += chunks + [piece[:0]] * (count - len(chunks))

        pieces = finer

    return [piece.tolist() for piece in pieces]


def oracle(full, layout, rng=None):
    """The part of each rank of a layout; with ``rng`` cut anywhere, and Partials of several summands."""
    grid = torch.tensor(layout.mesh)
    rows = []
    for dim in range(full.ndim):
        cutters = [p.is_shard() and p.dim % full.ndim == dim for p in layout.placements]
        counts = [size for size, cuts in zip(grid.shape, cutters, strict=True) if cuts]
        if rng is None:
            rows.append(nested_chunks(full.shape[dim], counts))
        else:
            intervals = cut(full.shape[dim], torch.Size(counts).numel(), rng)
            rows.append([list(range(*interval)) for interval in intervals])

    summands = {}
    parts = {}
    for place in torch.ones(grid.shape).nonzero().tolist():
        part = full
        for dim in range(full.ndim):
            number = 0
            for size, placement, index in zip(grid.shape, layout.placements, place, strict=True):
                if placement.is_shard() and placement.dim % full.ndim == dim:
                    number = number * size + index

            part = part.index_select(dim, torch.tensor(rows[dim][number], dtype=torch.int64))

        # Contribution k is k + 1 times a power of the value's position; the last one makes up the sum.
        partial = [
            (size, index)
            for size, placement, index in zip(grid.shape, layout.placements, place, strict=True)
            if placement.is_partial()
        ]
        parts[int(grid[tuple(place)])] = (part, partial)

    for rank, (part, partial) in parts.items():
        count, number = 1, 0
        for size, index in partial:
            count, number = count * size, number * size + index

        if count == 1:
            summands[rank] = part.clone()
        elif rng is None:
            summands[rank] = torch.zeros_like(part) if number else part.clone()
        else:
            summands[rank] = part - sum(range(1, count)) if number == 0 else torch.full_like(part, number)

    return summands


def one_case(rng, store, rank):
    """Run one random conversion; return what it was, what came and what should have."""
    shape = [rng.choice([0, 1, 2, 3, 5, 6]) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    dtype = rng.choice(DTYPES)
    full = (torch.arange(torch.Size(shape).numel()) % 97).reshape(shape).to(dtype)
    src, dst = random_layout(rng, len(shape), "sum"), random_layout(rng, len(shape), "sum")
    held = oracle(full, src, rng).get(rank)
    wanted = oracle(full, dst)
    root = rng.randrange(WORLD)
    kind = rng.choice(["scatter", "gather", "copy", "copy"])
    if kind == "scatter":
        what = (kind, root, dst)
        got = scatter_tensor(full if rank == root else None, store, dst.mesh, dst.placements, src=root)
        expected = wanted
    elif kind == "gather":
        what = (kind, root, src)
        got, expected = gather_tensor(held, store, src.mesh, src.placements, dst=root), {root: full}
    else:
        what = (kind, src, dst)
        got = copy_tensor(held, store, src, dst)
        same = src.mesh == dst.mesh and src.placements == dst.placements
        expected = {rank: held} if same and held is not None else wanted

    return (*what, shape, dtype), got, expected.get(rank)


@pytest.mark.parametrize("seed", range(4))
def test_random_conversions_match_the_dense_oracle(seed):
    def run(ctx):
        rng = random.Random(seed)
        store = ctx.open_store("random", timeout=20)
        for number in range(120):
            what, got, expected = one_case(rng, store, ctx.rank)
            if expected is None:
                assert got is None, (number, what)
            else:
                assert got is not None, (number, what)
                assert got.dtype == expected.dtype, (number, what)
                assert got.shape == expected.shape, (number, what, got, expected)
                assert torch.equal(got, expected), (number, what, got, expected)

    spawn(run, WORLD, timeout=60)
