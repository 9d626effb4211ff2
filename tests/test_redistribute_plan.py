"""plan_redistribution: as few communications as any order of single conversions needs, and what the plan says."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import UnsupportedOperationError, plan_redistribution


def kinds(dims, ops):
    """Placements of one mesh dimension."""
    return [Replicate(), *map(Shard, dims), *map(Partial, ops)]


def may_cut(state, number, dim):
    """No later mesh dimension cuts the tensor dimension: a rank can cut what it has, or join what its line has."""
    return not any(p.is_shard() and p.dim == dim for p in state[number + 1 :])


def single_conversions(state, target, dims):
    """What one mesh dimension can become, and whether its ranks communicate: the matrix, cell by cell."""
    for number, now in enumerate(state):
        others = [p.reduce_op for index, p in enumerate(state) if index != number and p.is_partial()]
        for then in kinds(dims, {p.reduce_op for p in target if p.is_partial()}):
            if then == now or then.is_partial() and any(op != then.reduce_op for op in others):
                continue

            if now.is_shard() and not may_cut(state, number, now.dim):
                continue

            if then.is_shard() and not may_cut(state, number, then.dim):
                continue

            if now.is_partial() and now.reduce_op == "avg" and others:
                continue

            if now.is_shard() and then.is_partial():
                talks = then.reduce_op == "avg"
            else:
                talks = not now.is_replicate()

            yield (*state[:number], then, *state[number + 1 :]), talks


def fewest_one_at_a_time(src, dst, dims):
    """Communications that the best order of single conversions needs; None if there is no order."""
    queue, seen, ties = [(0, 0, src)], set(), itertools.count(1)
    while queue:
        talks, _, state = heapq.heappop(queue)
        if state == dst:
            return talks

        if state not in seen:
            seen.add(state)
            for after, talk in single_conversions(state, dst, dims):
                heapq.heappush(queue, (talks + talk, next(ties), after))

    return None


def one_op(layout):
    return len({p.reduce_op for p in layout if p.is_partial()}) < 2


def plans(mesh, dims, src_ops, dst_ops):
    """Every pair of layouts on a mesh, and its plan."""
    ndim = torch.tensor(mesh).ndim
    for src in filter(one_op, itertools.product(kinds(dims, src_ops), repeat=ndim)):
        for dst in filter(one_op, itertools.product(kinds(dims, dst_ops), repeat=ndim)):
            yield src, dst, plan_redistribution(mesh, src, dst)


class TestFewestSteps:
    @pytest.mark.parametrize(
        ("mesh", "dims", "src_ops", "dst_ops"),
        [
            ([0, 1, 2], (0, 1), ("sum", "avg"), ("sum", "avg")),
            ([[0, 1], [2, 3]], (0, 1), ("sum",), ("sum", "max")),
            ([[0, 1], [2, 3], [4, 5]], (0, 1), ("avg",), ("avg", "sum")),
            ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], (0,), ("sum",), ("sum",)),
        ],
        ids=str,
    )
    def test_no_order_of_single_conversions_communicates_less(self, mesh, dims, src_ops, dst_ops):
        fewer = 0
        for src, dst, plan in plans(mesh, dims, src_ops, dst_ops):
            best = fewest_one_at_a_time(src, dst, dims)
            if best is not None:
                assert len(plan.collectives) <= best, plan
                fewer += len(plan.collectives) < best

        assert fewer or torch.tensor(mesh).ndim == 1

    def test_two_communications_always_suffice_and_one_without_partials(self):
        for src, _, plan in plans([[0, 1], [2, 3]], (0, 1), ("sum", "avg"), ("sum", "avg")):
            assert len(plan.collectives) <= (2 if any(p.is_partial() for p in src) else 1), plan

    @pytest.mark.parametrize(
        ("src", "dst", "steps"),
        [
            # Both Partials in one reduction.
            ([Partial(), Partial()], [Replicate(), Replicate()], [("all_reduce", (0, 1))]),
            ([Partial(), Partial()], [Shard(0), Shard(1)], [("reduce_scatter", (0, 1))]),
            ([Partial(), Partial()], [Replicate(), Partial()], [("all_reduce", (0,))]),
            ([Partial("avg"), Partial("avg")], [Replicate(), Partial("avg")], [("all_reduce", (0, 1)), ("mask", (1,))]),
            # Both Shards in one exchange, also where the outer cut goes and the inner one stays.
            ([Shard(0), Shard(1)], [Replicate(), Replicate()], [("all_gather", (0, 1))]),
            ([Shard(0), Shard(0)], [Replicate(), Shard(0)], [("all_to_all", (0, 1))]),
            ([Shard(0), Shard(0)], [Shard(0), Replicate()], [("all_gather", (1,))]),
            ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [("all_to_all", (0, 1))]),
            ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [("all_to_all", (1,))]),
            # Only what is left after a cut is moved, or reduced.
            ([Replicate(), Shard(1)], [Shard(0), Replicate()], [("all_gather", (1,))]),
            ([Partial(), Replicate()], [Replicate(), Shard(0)], [("slice", (1,)), ("all_reduce", (0,))]),
            # The reduction where there is the least to reduce.
            ([Partial(), Shard(0)], [Replicate(), Replicate()], [("all_reduce", (0,)), ("all_gather", (1,))]),
            ([Partial(), Shard(0)], [Shard(1), Replicate()], [("reduce_scatter", (0,)), ("all_gather", (1,))]),
            # No communication.
            ([Shard(0), Replicate()], [Partial(), Partial()], [("pad", (0,)), ("mask", (1,))]),
            ([Shard(0), Partial()], [Shard(0), Partial()], []),
        ],
        ids=str,
    )
    def test_steps(self, src, dst, steps):
        plan = plan_redistribution([[0, 1], [2, 3]], src, dst)
        assert sorted((step.kind, step.dims) for step in plan.steps) == sorted(steps), str(plan)

    def test_partials_of_two_ops_never_stand_side_by_side(self):
        for _, _, plan in plans([[0, 1], [2, 3]], (0,), ("sum",), ("max",)):
            for step in plan.steps:
                assert one_op([p for p in map(_placement, step.after)]), plan


def _placement(spec):
    return Partial(spec.op) if spec.kind == "Partial" else Replicate()


class Named:
    """As much of a DeviceMesh as is read."""

    mesh = torch.tensor([[0, 1], [2, 3]])
    mesh_dim_names = ("dp", "tp")


class TestText:
    def test_steps_ranks_and_bytes(self):
        plan = plan_redistribution(Named(), [Partial(), Shard(0)], [Shard(1), Replicate()], (8, 6), torch.float32)
        assert str(plan).splitlines() == [
            "[Partial(sum), Shard(0)] to [Shard(1), Replicate] on the mesh [[0, 1], [2, 3]], shape [8, 6], float32: "
            "2 communication steps, 384 bytes",
            "  -  sizes of shards: follow from the shape",
            "  1. reduce_scatter along mesh dimension 0 ('dp'): [Partial(sum), Shard(0)] to [Shard(1), Shard(0)], "
            "192 bytes",
            "     rank 0, rank 2 | rank 1, rank 3",
            "  2. all_gather along mesh dimension 1 ('tp'): [Shard(1), Shard(0)] to [Shard(1), Replicate], 192 bytes",
            "     rank 0, rank 1 | rank 2, rank 3",
        ]

    def test_without_a_shape(self):
        plan = plan_redistribution([3, 1], [Shard(-1)], [Replicate()])
        assert str(plan).splitlines() == [
            "[Shard(-1)] to [Replicate] on the mesh [3, 1]: 1 communication step",
            "  -  sizes of shards: exchanged once, along mesh dimension 0",
            "  1. all_gather along mesh dimension 0: [Shard(-1)] to [Replicate]",
            "     rank 3, rank 1",
        ]

    def test_local_steps(self):
        plan = plan_redistribution([0, 1, 2], [Shard(0)], [Partial()], (4,))
        assert "no communication" in str(plan)
        assert "pad along mesh dimension 0" in str(plan)
        assert "the value on every rank" in str(plan_redistribution([0, 1], [Replicate()], [Partial("avg")]))
        assert "the value on the first rank" in str(plan_redistribution([0, 1], [Replicate()], [Partial("max")]))

    def test_nothing_to_do(self):
        assert "the tensor itself" in str(plan_redistribution([0, 1], [Shard(0)], [Shard(0)]))
        assert "the tensor itself" in str(plan_redistribution([0, 1], [Shard(-1)], [Shard(1)], (3, 3)))
        assert "a copy" in str(plan_redistribution([[0, 1]], [Shard(0), Shard(0)], [Partial(), Shard(0)]))

    @pytest.mark.parametrize(
        ("src", "dst", "shape", "elements"),
        [
            ([Shard(0)], [Replicate()], (9, 2), 36),  # each of 3 ranks lacks 12 of 18
            ([Shard(0)], [Shard(1)], (9, 3), 18),  # each keeps 3 of 9
            ([Shard(0)], [Replicate()], (4, 1), 8),  # of 2, 2 and 0: they lack 2, 2 and 4
            ([Partial()], [Shard(0)], (9, 2), 36),  # each of 6 sums takes 2 terms of others, on 3 ranks
            ([Partial()], [Replicate()], (9, 2), 72),  # and then the sums go round
            ([Partial()], [Replicate()], (), 4),
            ([Replicate()], [Shard(0)], (9, 2), 0),
        ],
        ids=str,
    )
    def test_elements_that_move(self, src, dst, shape, elements):
        plan = plan_redistribution([0, 1, 2], src, dst, shape)
        assert sum(step.received(plan.mesh, shape) for step in plan.steps) == elements
        if elements:
            assert f", {elements} elements" in str(plan).splitlines()[0]

    def test_sizes_are_written_for_people(self):
        plan = plan_redistribution([0, 1], [Shard(0)], [Replicate()], (1024, 1024), torch.float32)
        assert str(plan).splitlines()[0].endswith("1 communication step, 4.2 MB")


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "error", "says"),
        [
            (([0, 0], [Shard(0)], [Shard(0)]), ValueError, "rank 0 twice"),
            (([0, -1], [Shard(0)], [Shard(0)]), ValueError, "rank -1"),
            (([0, 1], [Shard(0), Shard(0)], [Shard(0)]), ValueError, "src: 2 placements"),
            (([0, 1], [Shard(0)], []), ValueError, "dst: 0 placements"),
            (([0, 1], [Shard(2)], [Shard(0)], (3, 3)), ValueError, "Shard(2)"),
            (([0, 1], [Shard(0)], [Replicate()], ()), ValueError, "0-dim"),
            (([0, 1], [Shard(0)], [Replicate()], (-1,)), ValueError, "[-1]"),
            (([0, 1], [Shard(0)], [Replicate()], 5), TypeError, "not 5"),
            (([0, 1], [Shard(0)], [Replicate()], (1.5,)), TypeError, "1.5"),
            (([0, 1], [Shard(0)], [Shard(-1)]), ValueError, "give it"),
            (([[0, 1]], [Partial(), Partial("max")], [Shard(0)] * 2), UnsupportedOperationError, "max, sum"),
        ],
        ids=str,
    )
    def test_what_can_not_be(self, arguments, error, says):
        with pytest.raises(error) as raised:
            plan_redistribution(*arguments)

        assert says in str(raised.value)
        assert str(raised.value).startswith("plan_redistribution")
