"""Wrong arguments: who raises what, that nobody waits for long, and that the store goes on working."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtorch_core import (
    CollectiveMismatchError,
    Layout,
    StoreTimeoutError,
    UnsupportedOperationError,
    UnsupportedTensorError,
    copy_tensor,
    gather_tensor,
    scatter_tensor,
    spawn,
)

PROMPT = 5.0
"""Seconds: far below the stores' timeout here, far above what a slow machine needs."""


def coded(shape, dtype=torch.float32):
    """Every element tells where it is."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def outcomes(call, world_size=3, timeout=30.0):
    """Run ``call(rank, store)`` on every rank: the error or result of each, and that the store still works."""

    def run(ctx):
        store = ctx.open_store("mistakes", timeout=timeout)
        begin = time.monotonic()
        try:
            outcome = call(ctx.rank, store)
        except Exception as error:
            outcome = error

        took = time.monotonic() - begin
        full = coded((world_size,)) if ctx.rank == 0 else None
        after = scatter_tensor(full, store, range(world_size), [Shard(0)], src=0)
        assert after.tolist() == [ctx.rank]
        return outcome, took

    results = spawn(run, world_size, timeout=60)
    assert max(took for _, took in results) < PROMPT
    return [outcome for outcome, _ in results]


def scatter(full, mesh, placements, src=0):
    """A call of scatter_tensor with ``full`` on ``src``."""
    return lambda rank, store: scatter_tensor(full if rank == src else None, store, mesh, placements, src=src)


class TestArgumentsAlikeOnAllRanks:
    @pytest.mark.parametrize(
        ("mesh", "error", "says"),
        [
            ([0, 3], ValueError, "rank 3"),
            ([-1, 0], ValueError, "rank -1"),
            ([[0, 1], [1, 2]], ValueError, "rank 1 twice"),
            ([[0, 1], [2]], ValueError, "ragged"),
            ([0, [1, 2]], ValueError, "ragged"),
            ([], ValueError, "no rank"),
            ([[], []], ValueError, "no rank"),
            ([True, False], TypeError, "not True"),
            ([0.0, 1.0], TypeError, "not 0.0"),
            (["0", "1"], TypeError, "not '0'"),
            (torch.tensor([0.0, 1.0]), TypeError, "not 0.0"),
            (torch.tensor(0), TypeError, "at least one dimension"),
            (0, TypeError, "nested"),
            ("01", TypeError, "nested"),
            (None, TypeError, "nested"),
        ],
        ids=str,
    )
    def test_mesh(self, mesh, error, says):
        for outcome in outcomes(scatter(coded((4,)), mesh, [Replicate()])):
            assert type(outcome) is error
            assert says in str(outcome)
            assert "scatter_tensor on store 'mistakes', rank " in str(outcome)

    @pytest.mark.parametrize(
        ("placements", "error", "says"),
        [
            ([], ValueError, "0 placements"),
            ([Shard(0), Shard(1)], ValueError, "2 placements (Shard(0), Shard(1)) for the 1 dimensions"),
            ([0], TypeError, "0 is not a placement"),
            (Shard(0), TypeError, "must be a sequence"),
            ([_StridedShard(0, split_factor=2)], UnsupportedOperationError, "_StridedShard"),
            ([Partial("summ")], UnsupportedOperationError, "Did you mean 'sum'?"),
            ([Partial("premul_sum")], UnsupportedOperationError, "premul_sum"),
        ],
        ids=str,
    )
    def test_placements(self, placements, error, says):
        for outcome in outcomes(scatter(coded((4, 4)), [0, 1], placements)):
            assert type(outcome) is error
            assert says in str(outcome)

    def test_partials_of_different_ops(self):
        for outcome in outcomes(scatter(coded((4,)), [[0, 1]], [Partial("sum"), Partial("max")])):
            assert isinstance(outcome, UnsupportedOperationError)
            assert "max, sum" in str(outcome)

    @pytest.mark.parametrize(("src", "error"), [(3, ValueError), (-1, ValueError), (True, TypeError), ("0", TypeError)])
    def test_src_and_dst(self, src, error):
        for outcome in outcomes(scatter(coded((4,)), [0], [Replicate()], src=src)):
            assert type(outcome) is error
            assert "src" in str(outcome)

        for outcome in outcomes(lambda rank, store: gather_tensor(coded((1,)), store, [0], [Replicate()], dst=src)):
            assert type(outcome) is error
            assert "dst" in str(outcome)

    @pytest.mark.parametrize(
        ("device", "says"), [("cpux", "cpux"), ("meta", "'cpu' or 'cuda:N'"), ("cuda:99", "cuda:99"), (1.5, "1.5")]
    )
    def test_device(self, device, says):
        def call(rank, store):
            return copy_tensor(coded((2,)), store, Layout([0], [Replicate()]), Layout([1, 2], [Shard(0)], device))

        for outcome in outcomes(call):
            assert type(outcome) is ValueError
            assert says in str(outcome)

    def test_layout(self):
        for outcome in outcomes(lambda rank, store: copy_tensor(None, store, [0, 1], Layout([0], [Replicate()]))):
            assert type(outcome) is TypeError
            assert "src must be a Layout" in str(outcome)


class TestWhatTheSourceHolds:
    @pytest.mark.parametrize(
        ("full", "placements", "error", "says"),
        [
            (None, [Replicate()], ValueError, "passed None"),
            ([1.0, 2.0], [Replicate()], UnsupportedTensorError, "list"),
            (coded((3, 3)).to_sparse(), [Replicate()], UnsupportedTensorError, "sparse"),
            (torch.empty(2, device="meta"), [Replicate()], UnsupportedTensorError, "meta"),
            (coded((4, 2)), [Shard(2)], ValueError, "Shard(2) on mesh dimension 0"),
            (coded((4, 2)), [Shard(-3)], ValueError, "dimensions -2 to 1"),
            (torch.tensor(1.0), [Shard(0)], ValueError, "0-dim"),
            (coded((4,)).to(torch.float8_e5m2), [Partial()], UnsupportedTensorError, "float8_e5m2"),
            (coded((4,), torch.complex64), [Partial("min")], UnsupportedTensorError, "no order"),
            (coded((4,), torch.bool), [Partial("avg")], UnsupportedTensorError, "bool"),
            (coded((4,)), [Partial("bxor")], UnsupportedTensorError, "float32"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_scatter_raises_on_all_who_take_part(self, full, placements, error, says):
        guilty, other, outside = outcomes(scatter(full, [1, 0], placements))
        assert type(guilty) is error
        assert says in str(guilty)
        assert type(other) is error
        assert says in str(other)
        assert "rank 0 has raised" in str(other)
        assert outside is None

    @pytest.mark.parametrize("dst", [0, 1, 2])
    def test_gather_with_a_part_missing(self, dst):
        def call(rank, store):
            return gather_tensor(coded((2,)) if rank == 0 else None, store, [0, 1], [Shard(0)], dst=dst)

        results = outcomes(call)
        assert type(results[1]) is ValueError  # who forgot it
        assert "passed None" in str(results[1])
        assert type(results[dst]) is ValueError
        assert "rank 1" in str(results[dst])

    def test_gather_with_a_part_missing_lets_the_other_senders_go(self):
        def call(rank, store):
            return gather_tensor(coded((2,)) if rank in (1, 2) else None, store, [0, 1, 2], [Shard(0)], dst=3)

        results = outcomes(call, world_size=4)
        assert [type(outcome) for outcome in results] == [ValueError, type(None), type(None), ValueError]
        assert "rank 0 has raised" in str(results[3])

    def test_gather_with_the_receivers_part_missing_where_others_hold_the_same(self):
        def call(rank, store):
            held = coded((2,)) if rank != 1 else None
            return gather_tensor(held, store, [[0, 1], [2, 3]], [Shard(0), Replicate()], dst=1)

        results = outcomes(call, world_size=4)
        assert [type(outcome) for outcome in results] == [type(None), ValueError, ValueError, type(None)]

    def test_copy_with_a_part_missing_raises_on_all_who_depend_on_it(self):
        def call(rank, store):
            held = coded((2, 2)) if rank < 2 else None
            return copy_tensor(held, store, Layout([0, 1, 2], [Shard(0)]), Layout([2, 3, 0], [Shard(1)]))

        for outcome in outcomes(call, world_size=4):
            assert type(outcome) is ValueError
            assert "rank 2" in str(outcome)

    def test_copy_where_the_one_who_fails_gets_only_the_neutral_element(self):
        def call(rank, store):
            held = coded((2, 2)) if rank == 1 else None
            return copy_tensor(held, store, Layout([0, 1], [Shard(0)]), Layout([2, 0], [Partial()]))

        assert [type(outcome) for outcome in outcomes(call)] == [ValueError] * 3

    @pytest.mark.parametrize("dst", [0, 3])
    @pytest.mark.parametrize(
        ("pieces", "says"),
        [
            ([(2, 3), (2, 4), (2, 3)], "rank 0 has shape [2, 3] and rank 1 [2, 4]"),
            ([(2, 3), (2, 3), (2,)], "rank 2 has 1"),
        ],
    )
    def test_gather_of_pieces_that_do_not_fit(self, dst, pieces, says):
        def call(rank, store):
            return gather_tensor(coded(pieces[rank]) if rank < 3 else None, store, [0, 1, 2], [Shard(0)], dst=dst)

        results = outcomes(call, world_size=4)
        assert isinstance(results[dst], CollectiveMismatchError)
        assert says in str(results[dst])
        assert all(results[rank] is None for rank in range(4) if rank != dst)

    def test_pieces_that_do_not_fit_on_a_grid(self):
        sizes = [(2, 1), (2, 2), (3, 1), (3, 3)]

        def call(rank, store):
            layout = Layout([[0, 1], [2, 3]], [Shard(0), Shard(1)])
            return copy_tensor(coded(sizes[rank]), store, layout, Layout([0, 1], [Shard(0)]))

        for outcome in outcomes(call, world_size=4):
            assert isinstance(outcome, CollectiveMismatchError)
            assert "rank 1 has shape [2, 2] and rank 3 [3, 3]" in str(outcome)
            assert "mesh dimension 1" in str(outcome)

    def test_partials_of_different_shapes(self):
        def call(rank, store):
            return gather_tensor(coded((rank + 1,)), store, [0, 1, 2], [Partial()], dst=1)

        results = outcomes(call)
        assert isinstance(results[1], CollectiveMismatchError)
        assert "nothing cuts it" in str(results[1])

    def test_parts_of_different_dtypes(self):
        def call(rank, store):
            held = coded((2,), [torch.float32, torch.int64][rank % 2])
            return copy_tensor(held, store, Layout([0, 1], [Shard(0)]), Layout([1, 2], [Replicate()]))

        results = outcomes(call)
        assert isinstance(results[2], CollectiveMismatchError)
        assert "rank 0 holds torch.float32 and rank 1 torch.int64" in str(results[2])


class TestRanksThatDisagree:
    def test_different_placements(self):
        all_done = threading.Barrier(2)

        def run(ctx):
            store = ctx.open_store("mismatch", timeout=0.5)
            # The source is not told: it waits for a reader that has raised, as long as its timeout.
            with pytest.raises(CollectiveMismatchError if ctx.rank else StoreTimeoutError) as caught:
                scatter_tensor(coded((4,)), store, [1, 0], [Shard(0) if ctx.rank else Replicate()], src=0)

            all_done.wait(20)
            return str(caught.value)

        source, other = spawn(run, 2, timeout=30)
        assert "rank 1" in source
        assert "this rank: scatter_tensor from [Replicate] on the mesh [0] to [Shard(0)]" in other
        assert "rank 0: scatter_tensor from [Replicate] on the mesh [0] to [Replicate]" in other

    def test_different_functions_and_receivers(self):
        def call(rank, store):
            if rank == 0:
                return gather_tensor(coded((2,)), store, [0, 1], [Shard(0)], dst=0)

            if rank == 1:
                return gather_tensor(coded((2,)), store, [0, 1], [Shard(0)], dst=1)

            return None

        zero, one = outcomes(call, world_size=2)
        for outcome in (zero, one):
            assert isinstance(outcome, CollectiveMismatchError)
            assert "to [Replicate] on the mesh [0]" in str(outcome)
            assert "to [Replicate] on the mesh [1]" in str(outcome)

    def test_missing_rank_costs_its_timeout_and_is_named(self):
        all_done = threading.Barrier(3)

        def run(ctx):
            store = ctx.open_store("missing", timeout=0.5)
            begin = time.monotonic()
            if ctx.rank != 2:
                late = "not all of rank 0 have read" if ctx.rank else "rank 2 has not sent"
                with pytest.raises(StoreTimeoutError, match=late):
                    gather_tensor(coded((2,)), store, [0, 1, 2], [Shard(0)], dst=0)

            took = time.monotonic() - begin
            all_done.wait(20)
            return took

        for took in spawn(run, 3, timeout=30)[:2]:
            assert 0.4 < took < PROMPT

    def test_failure_ends_a_spawn_promptly(self):
        def run(ctx):
            store = ctx.open_store("prompt", timeout=60)
            return gather_tensor(None if ctx.rank == 1 else coded((2,)), store, [0, 1, 2], [Shard(0)], dst=2)

        begin = time.monotonic()
        with pytest.raises(Exception, match="rank [0-2] of 3 failed with ValueError"):
            spawn(run, 3, timeout=30)

        assert time.monotonic() - begin < PROMPT
