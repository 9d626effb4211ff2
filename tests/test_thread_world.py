"""spawn(torch_distributed=True): each rank that is a thread has a torch.distributed of its own."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d

from dtorch_core import PeerLostError, RankFailedError, UnsupportedOperationError, spawn
from dtorch_core._thread_ranks import worlds

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import thread_world_ranks
    from thread_world_ranks import LIMIT, check_every_kind_of_group, from_every_kind_of_group, rows, run

elsewhere = thread_world_ranks.elsewhere
level = thread_world_ranks.level


class Summed(torch.autograd.Function):
    """The values as they are; in backward, the sum of the gradients of a group's ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def from_groups_in_use_at_once(ctx):
    """What each of a rank's threads got from a group of its own, forward and backward; and torch's level of checks."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = [dist.group.WORLD, pairs[rank // 2], dist.new_group()]

    def use(number, group):
        got = []
        for turn in range(10):
            x = rows(rank) + 100 * number + turn
            dist.all_reduce(x, group=group)
            y = rows(rank).requires_grad_()
            (Summed.apply(y, group) * (rows(rank) + 100 * number + turn)).sum().backward()
            got.append((number, turn, x, functional.all_reduce(y.grad, "sum", group).wait()))

        return got

    with ThreadPoolExecutor(len(groups)) as pool:
        each = pool.map(use, range(len(groups)), groups, timeout=LIMIT)
        return dist.get_debug_level().name, [one for got in each for one in got]


class TestCollectives:
    def test_every_kind_of_group_works_in_threads(self):
        check_every_kind_of_group(run(from_every_kind_of_group))

    @pytest.mark.parametrize("threads_per_process", [1, 2])
    def test_every_kind_of_group_works_in_processes(self, elsewhere, threads_per_process):
        results = spawn(
            elsewhere.from_every_kind_of_group, 4, ranks_as="processes", threads_per_process=threads_per_process,
            torch_distributed=True, timeout=100,
        )  # fmt: skip
        check_every_kind_of_group(results)

    @pytest.mark.parametrize("level", ["OFF", "DETAIL"], indirect=True)
    def test_groups_in_use_at_once_are_apart(self, level):
        for rank, (found, got) in enumerate(run(from_groups_in_use_at_once)):
            assert found == level and len(got) == 30
            for number, turn, total, grad in got:
                members = [rank // 2 * 2, rank // 2 * 2 + 1] if number == 1 else range(4)
                expected = sum(rows(member) + 100 * number + turn for member in members)
                assert torch.equal(total, expected)
                assert torch.equal(grad, len(members) * expected)

    def test_groups_are_numbered_by_each_rank_alone(self):
        def rank(ctx):
            first = ctx.rank // 2 * 2
            for _ in range(3):
                dist.new_group([first, first + 1], use_local_synchronization=True)

            everybody = dist.new_group()
            x = rows(ctx.rank)
            dist.all_reduce(x, group=everybody)
            return x, distributed_c10d._world.pg_names[everybody]

        results = run(rank)
        assert len({name for _, name in results}) == 1
        for x, _ in results:
            assert torch.equal(x, sum(map(rows, range(4))))

    def test_a_group_can_be_destroyed_and_made_again(self):
        def rank(ctx):
            for number in range(3):
                dist.destroy_process_group()
                assert not dist.is_initialized()
                store = dist.PrefixStore(f"again {number}", ctx._scope.rendezvous)
                dist.init_process_group("dtorch", store=store, rank=ctx.rank, world_size=ctx.world_size)
                x = rows(ctx.rank)
                dist.all_reduce(x)
                assert torch.equal(x, rows(0) + rows(1))

        run(rank, 2)

    def test_ranks_that_end_at_different_times_do_not_take_away_the_others_groups(self):
        ended = threading.Event()

        def rank(ctx):
            pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][ctx.rank // 2]
            if ctx.rank < 2:
                dist.destroy_process_group()
                return None

            assert ended.wait(LIMIT)
            return functional.all_reduce(rows(ctx.rank), "sum", pair).wait()

        threading.Timer(0.3, ended.set).start()
        results = run(rank)
        assert torch.equal(results[2], rows(2) + rows(3)) and torch.equal(results[3], rows(2) + rows(3))

    def test_one_rank_is_enough(self):
        assert run(lambda ctx: (dist.get_rank(), dist.get_world_size()), 1) == [(0, 1)]


class TestThreadsOfARank:
    def test_a_cached_property_may_be_collective(self):
        """Up to Python 3.11 it has one lock for all objects."""

        class Job:
            @functools.cached_property
            def total(self):
                return functional.all_reduce(rows(dist.get_rank()), "sum", dist.group.WORLD).wait()

        def body(ctx):
            job = Job()
            return job.total, job.total is job.total, Job.total

        for total, kept, itself in run(body):
            assert torch.equal(total, sum(rows(rank) for rank in range(4)))
            assert kept and itself is vars(Job)["total"]

    def test_a_thread_that_a_rank_starts_is_the_ranks(self):
        def rank(ctx):
            seen = []

            def helper():
                x = functional.all_reduce(rows(dist.get_rank()), "sum", dist.group.WORLD).wait()
                seen.append((dist.get_rank(), x, torch.autograd._is_multithreading_enabled_flag()))

            def is_multithreaded():
                return torch._C._is_multithreading_enabled()

            torch.autograd._is_multithreading_enabled_flag = is_multithreaded
            thread = threading.Thread(target=helper)
            thread.start()
            thread.join(LIMIT)
            return seen[0]

        try:
            for number, (own, total, multithreaded) in enumerate(run(rank)):
                assert own == number and not multithreaded
                assert torch.equal(total, sum(map(rows, range(4))))
        finally:
            del torch.autograd._is_multithreading_enabled_flag


class TestFailures:
    def test_a_rank_that_fails_wakes_the_others(self):
        def rank(ctx):
            dist.barrier()
            if ctx.rank == 1:
                raise ValueError("no")

            try:
                dist.all_reduce(rows(ctx.rank))
            except PeerLostError as error:
                heard.append(str(error))
                raise

        heard = []
        with pytest.raises(RankFailedError, match="rank 1 of 4 failed with ValueError: no"):
            run(rank)

        assert len(heard) == 3 and all("rank 1 failed: ValueError: no" in text for text in heard)

    def test_what_torch_lacks_is_said(self, monkeypatch):
        monkeypatch.setattr(worlds, "MISSING", ["_World has no property pg_map"])
        with pytest.raises(UnsupportedOperationError, match="threads: _World has no property pg_map. Use"):
            run(lambda ctx: None, 2)

    def test_a_new_variable_of_the_module_is_missed(self, monkeypatch):
        monkeypatch.setattr(distributed_c10d, "_pg_colours", {}, raising=False)
        monkeypatch.setattr(
            distributed_c10d._World,
            "pg_colours",
            property(eval("lambda self: _pg_colours", vars(distributed_c10d))),
            raising=False,
        )
        [missed] = worlds.missing()
        assert missed == "_World.pg_colours is kept in a variable of the module that is not known here"

    def test_nothing_is_missed_in_this_torch(self):
        assert worlds.MISSING == []
