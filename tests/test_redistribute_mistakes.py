"""Wrong arguments of redistribute: who raises what, that nobody waits for long, and that the groups go on working."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtorch_core import (
    AbortedError,
    CollectiveMismatchError,
    StoreTimeoutError,
    UnsupportedOperationError,
    UnsupportedTensorError,
    redistribute,
    redistribute_mesh,
    spawn,
)
from dtorch_core.placement._walk import Walk

PROMPT = 5.0
"""Seconds: far below the groups' timeout here, far above what a slow machine needs."""
MESH = [[0, 1], [2, 3]]


def coded(shape, dtype=torch.float32):
    """Every element tells where it is."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def outcome_of(call):
    """The result or error, and the seconds it took."""
    begin = time.monotonic()
    try:
        outcome = call()
    except Exception as error:
        outcome = error

    return outcome, time.monotonic() - begin


def outcomes(call, world_size=3):
    """Run ``call(rank, group)`` on every rank: the error or result of each, and that the group still works."""

    def run(ctx):
        group = ctx.open_group("mistakes", timeout=30)
        outcome, took = outcome_of(lambda: call(ctx.rank, group))
        after = redistribute(coded((2,)) + 2 * ctx.rank, group, Shard(0), Replicate())
        assert torch.equal(after, coded((2 * world_size,)))
        return outcome, took

    results = spawn(run, world_size, timeout=60)
    assert max(took for _, took in results) < PROMPT
    return [outcome for outcome, _ in results]


def mesh_outcomes(call, warm):
    """The same for ``call(rank, manager)`` on a 2 by 2 mesh. ``warm``: the groups it needs are open already."""

    def run(ctx):
        manager = ctx.open_manager("mistakes", timeout=30)
        every_dim = [Partial(), Shard(0)], [Replicate(), Replicate()]
        if warm:
            redistribute_mesh(coded((2,)), manager, MESH, *every_dim)

        outcome, took = outcome_of(lambda: call(ctx.rank, manager))
        after = redistribute_mesh(coded((2,)), manager, MESH, *every_dim)
        assert after.tolist() == [0, 2, 0, 2]
        return outcome, took

    results = spawn(run, 4, timeout=60)
    assert max(took for _, took in results) < PROMPT
    return [outcome for outcome, _ in results]


class TestArgumentsAlikeOnAllRanks:
    @pytest.mark.parametrize(
        ("src", "dst", "error", "says"),
        [
            (Shard(2), Replicate(), ValueError, "Shard(2)"),
            (Replicate(), Shard(-3), ValueError, "dimensions -2 to 1"),
            (0, Replicate(), TypeError, "src: 0 is not a placement"),
            (Replicate(), None, TypeError, "dst: None is not a placement"),
            ([Shard(0), Shard(1)], Replicate(), ValueError, "2 placements"),
            (_StridedShard(0, split_factor=2), Replicate(), UnsupportedOperationError, "_StridedShard"),
            (Partial("summ"), Replicate(), UnsupportedOperationError, "Did you mean 'sum'?"),
            (Replicate(), Partial("premul_sum"), UnsupportedOperationError, "premul_sum"),
            (Partial("bor"), Replicate(), UnsupportedTensorError, "Partial(bor)"),
            (Shard(0), Partial("band"), UnsupportedTensorError, "Partial(band)"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("shape", [None, (12, 4)], ids=["sizes exchanged", "shape given"])
    def test_placements(self, src, dst, error, says, shape):
        for outcome in outcomes(lambda rank, group: redistribute(coded((4, 4)), group, src, dst, shape=shape)):
            assert type(outcome) is error, outcome
            assert says in str(outcome)
            assert "redistribute on group 'mistakes', rank " in str(outcome)

    @pytest.mark.parametrize(
        ("shape", "error"), [((-1, 4), ValueError), (4, TypeError), ((2.0, 4), TypeError), ("44", TypeError)], ids=str
    )
    def test_shape(self, shape, error):
        x = coded((4, 4))
        for outcome in outcomes(lambda rank, group: redistribute(x, group, Shard(0), Shard(1), shape=shape)):
            assert type(outcome) is error

    def test_shape_that_the_parts_do_not_have(self):
        x = coded((4,))
        for outcome in outcomes(lambda rank, group: redistribute(x, group, Shard(0), Replicate(), shape=(9,))):
            assert type(outcome) is ValueError
            assert "has the shape [4], but of a tensor of shape [9] it holds [3]" in str(outcome)

    def test_0_dim_tensor_has_no_shards(self):
        for outcome in outcomes(lambda rank, group: redistribute(coded(()), group, Shard(0), Replicate())):
            assert type(outcome) is ValueError
            assert "0-dim" in str(outcome)

    @pytest.mark.parametrize(
        ("mesh", "src", "error", "says"),
        [
            ([0, 4], [Shard(0)], ValueError, "rank 4"),
            ([[0, 1], [2]], [Shard(0)], ValueError, "ragged"),
            (MESH, [Shard(0)], ValueError, "1 placements"),
            (MESH, [Partial("sum"), Partial("max")], UnsupportedOperationError, "max, sum"),
        ],
        ids=str,
    )
    def test_mesh(self, mesh, src, error, says):
        call = lambda rank, manager: redistribute_mesh(coded((4,)), manager, mesh, src, [Replicate()] * 2)  # noqa: E731
        for outcome in mesh_outcomes(call, warm=False):
            assert type(outcome) is error
            assert says in str(outcome)
            assert "redistribute_mesh on manager 'mistakes', rank " in str(outcome)


WRONG = [
    (None, ValueError, "passed None"),
    ([1.0], UnsupportedTensorError, "list"),
    (coded((4, 4)).to_sparse(), UnsupportedTensorError, "sparse"),
    (coded((4, 4)).to(torch.float8_e5m2), None, "float8_e5m2"),
    (coded((4, 4), torch.int32), None, "int32"),
    (coded((4, 4, 4)), None, "[4, 4, 4]"),
    (torch.tensor(1.0), None, "[]"),
    (coded((4, 5)), None, "[4, 5]"),
]
CELLS = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(0), Partial()),
    (Partial(), Replicate()),
    (Partial(), Shard(1)),
    (Partial(), Partial("max")),
]
"""Those that need the other ranks, at least for the sizes."""


class TestOneRankIsWrong:
    @pytest.mark.parametrize("known", [False, True], ids=["sizes exchanged", "shape given"])
    @pytest.mark.parametrize(("src", "dst"), CELLS, ids=str)
    @pytest.mark.parametrize(("wrong", "error", "says"), WRONG, ids=[says for _, _, says in WRONG])
    def test_all_ranks_hear_of_it(self, wrong, error, says, src, dst, known):
        if known and src.is_shard() and dst.is_partial():
            pytest.skip("a local step: no rank waits for another one")

        shape = ((12, 4) if src.is_shard() else (4, 4)) if known else None

        def call(rank, group):
            return redistribute(wrong if rank == 1 else coded((4, 4)), group, src, dst, shape=shape)

        found = outcomes(call)
        for outcome in found:
            assert isinstance(outcome, Exception), found

        if error is not None:
            assert type(found[1]) is error

        for outcome in (found[0], found[2]):
            assert isinstance(outcome, (CollectiveMismatchError, ValueError, UnsupportedTensorError)), outcome
            assert "rank 1" in str(outcome)
            # A reduce_scatter shows what is left of the shape in its parts.
            assert says in str(outcome) or "0-dim" in str(outcome) or f"[4, 2{says[5:]}" in str(outcome), outcome

    def test_parts_that_do_not_fit(self):
        def call(rank, group):
            return redistribute(coded((rank, 4 + rank // 2)), group, Shard(0), Replicate())

        for outcome in outcomes(call):
            assert isinstance(outcome, CollectiveMismatchError)
            assert "rank 0 has shape [0, 4] and rank 2 [2, 5]" in str(outcome)

    def test_dtypes_that_differ_where_no_sizes_are_exchanged(self):
        def call(rank, group):
            x = coded((2, 6), torch.int64 if rank == 2 else torch.float32)
            return redistribute(x, group, Shard(0), Shard(1), shape=(6, 6))

        for outcome in outcomes(call):
            assert isinstance(outcome, CollectiveMismatchError)
            assert "rank 2" in str(outcome)

    def test_shapes_given_that_differ(self):
        def call(rank, group):
            # Parts of 1 and 2 rows: a copy from one to the other would stretch it.
            rows = 3 if rank == 2 else 6
            return redistribute(coded((rows // 3, 3)), group, Shard(0), Shard(1), shape=(rows, 3))

        for outcome in outcomes(call):
            assert isinstance(outcome, CollectiveMismatchError)
            assert "rank 2" in str(outcome)

    def test_placements_that_differ(self):
        def call(rank, group):
            return redistribute(coded((4, 4)), group, Shard(0), Shard(1) if rank == 1 else Replicate())

        for outcome in outcomes(call):
            assert isinstance(outcome, CollectiveMismatchError)
            assert "[Shard(0)] to [Shard(1)]" in str(outcome)
            assert "[Shard(0)] to [Replicate]" in str(outcome)

    @pytest.mark.parametrize("warm", [False, True], ids=["new groups", "open groups"])
    @pytest.mark.parametrize("shape", [None, (8,)], ids=["sizes exchanged", "shape given"])
    @pytest.mark.parametrize("wrong", [None, coded((4,), torch.int64), coded((3,)), coded((4, 1))], ids=str)
    def test_all_ranks_of_a_mesh_hear_of_it_before_any_step(self, wrong, shape, warm):
        # all_reduce along one mesh dimension, then all_gather along the other: rank 1 and rank 2 never meet.
        def call(rank, manager):
            x = wrong if rank == 1 else coded((4,))
            return redistribute_mesh(x, manager, MESH, [Partial(), Shard(0)], [Replicate(), Replicate()], shape=shape)

        for outcome in mesh_outcomes(call, warm):
            assert isinstance(outcome, (CollectiveMismatchError, ValueError)), outcome

    def test_ranks_that_never_meet_do_not_hear_of_it(self):
        def call(rank, manager):
            x = coded((4,), torch.int64) if rank == 1 else coded((4,))
            return redistribute_mesh(x, manager, MESH, [Replicate(), Partial()], [Replicate(), Replicate()])

        found = mesh_outcomes(call, warm=False)
        assert [type(outcome) for outcome in found[:2]] == [CollectiveMismatchError] * 2
        assert all(torch.equal(outcome, coded((4,)) * 2) for outcome in found[2:])


class TestOneRankFailsOnItsWay:
    @pytest.mark.parametrize("failing", [0, 1], ids=["first step", "second step"])
    def test_all_ranks_hear_of_it(self, monkeypatch, failing):
        prepared, fails = Walk._prepared, set()

        def short_of_memory(self, step, *rest):
            if threading.get_ident() in fails and step is self._plan.steps[failing]:
                fails.clear()
                raise MemoryError("no more")

            return prepared(self, step, *rest)

        monkeypatch.setattr(Walk, "_prepared", short_of_memory)

        def call(rank, manager):
            if rank == 1:
                fails.add(threading.get_ident())

            return redistribute_mesh(coded((2,)), manager, MESH, [Partial(), Shard(0)], [Replicate(), Replicate()])

        found = mesh_outcomes(call, warm=True)
        # The lines are rank 0, 2 and rank 1, 3 in the first step, and rank 0, 1 and rank 2, 3 in the second.
        heard = [outcome for rank, outcome in enumerate(found) if rank != 1 and isinstance(outcome, Exception)]
        assert isinstance(found[1], MemoryError)
        assert len(heard) == (3 if failing == 0 else 1)
        assert all(isinstance(outcome, CollectiveMismatchError) for outcome in heard)
        assert "MemoryError: no more" in str(found[3 if failing == 0 else 0])


class TestOneRankIsMissing:
    @pytest.mark.parametrize(("src", "shape"), [(Shard(0), None), (Shard(0), (12,)), (Partial(), None)], ids=str)
    def test_the_others_give_up_and_name_it(self, src, shape):
        over = threading.Barrier(3)

        def run(ctx):
            group = ctx.open_group("missing", timeout=0.3)
            call = lambda: redistribute(coded((4,)), group, src, Replicate(), shape=shape)  # noqa: E731
            found = [outcome_of(call)[0] for _ in range(2)] if ctx.rank != 1 else []
            over.wait(20)
            return found

        first, _, second = spawn(run, 3, timeout=60)
        errors = [first[0], second[0]]
        assert any(isinstance(error, StoreTimeoutError) and "rank 1" in str(error) for error in errors), errors
        assert all(isinstance(error, (StoreTimeoutError, AbortedError)) for error in errors), errors
        assert all(isinstance(found[1], AbortedError) for found in (first, second))
