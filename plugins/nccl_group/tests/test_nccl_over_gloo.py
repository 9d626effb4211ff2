"""The group without a GPU: torch's Gloo in NCCL's place, at the one module that knows NCCL."""

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import PeerLostError, RankFailedError, UnsupportedOperationError, redistribute_mesh, spawn, use_backend
from dtorch_core.testing import ThreadGroupTests, run_ranks

PROGRAM = Path(__file__).with_name("nccl_ranks.py")

_spec = importlib.util.spec_from_file_location("nccl_ranks", PROGRAM)
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
LIMIT = ranks.GLOO_LIMIT


@pytest.fixture(scope="module", autouse=True)
def registered():
    with ranks.over_gloo():
        yield


def on_ranks(body, world_size=2, timeout=LIMIT):
    return ranks.on_threads(body, world_size, timeout)


def part(rank, *shape):
    return ranks.part(rank, "cpu", *shape)


class TestKit(ThreadGroupTests):
    backend = "gloo"

    @pytest.fixture(autouse=True)
    def _contract(self, request):
        """As the kit's, without open files: Gloo's sockets go with the last error that knows the group."""
        self._skip_unless_declared(request.function)
        if getattr(request.node, "callspec", None) and request.node.callspec.params.get("world_size", 0) > 3:
            pytest.skip("many ranks over Gloo take long, and 3 say the same")

        before = set(threading.enumerate())
        yield
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
            assert not thread.is_alive(), f"the test left behind: {thread.name}"


class TestGroup:
    def test_it_is_a_process_group_as_torch_makes_it(self):
        def body(group):
            assert type(group.process_group) is dist.ProcessGroup
            assert group.process_group.name() == "gloo"
            with pytest.raises(UnsupportedOperationError, match="any_source"):
                group.recv()

        on_ranks(body)

    def test_meshes_through_the_manager(self):
        from torch.distributed.tensor import Replicate, Shard

        mesh = [[0, 1], [2, 3]]
        dense = torch.arange(40.0).reshape(8, 5)

        def rank(ctx):
            with use_backend(group="gloo"), ctx.open_manager() as manager:
                row, column = divmod(ctx.rank, 2)
                mine = dense.chunk(2, 0)[row].chunk(2, 1)[column]
                whole = redistribute_mesh(mine, manager, mesh, [Shard(0), Shard(1)], [Replicate(), Replicate()])
                assert torch.equal(whole, dense)
                first = manager.groups_for(mesh, 0)
                assert manager.groups_for(mesh, 0) is first
                assert first.backend == "gloo"

        with use_backend(group="gloo"):
            run_ranks(rank, 4, 2 * LIMIT)


class TestTorchDistributed:
    def test_programs_run_on_it(self):
        def rank(ctx):
            assert type(dist.group.WORLD) is dist.ProcessGroup
            assert dist.get_backend() == "dtorch"
            x = part(ctx.rank, 4)
            dist.all_reduce(x)
            assert torch.equal(x, part(0, 4) + part(1, 4))
            sub = dist.new_group([0, 1])
            dist.broadcast(x, 0, group=sub)
            if importlib.util.find_spec("numpy") is not None:  # torch itself needs it here
                objects = [None, None]
                dist.all_gather_object(objects, {"rank": ctx.rank})
                assert objects == [{"rank": 0}, {"rank": 1}]

            inner = dist.split_group(dist.group.WORLD, [[0], [1]])
            assert inner.size() == 1
            dist.barrier()
            got, peer = torch.zeros(4), 1 - ctx.rank
            ops = [dist.P2POp(dist.isend, part(ctx.rank, 4), peer), dist.P2POp(dist.irecv, got, peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

            assert torch.equal(got, part(peer, 4))
            dist.destroy_process_group(sub)

        with use_backend(group="gloo"):
            spawn(rank, 2, torch_distributed=True, timeout=2 * LIMIT)

    def test_rank_that_fails_ends_those_that_meet(self):
        def rank(ctx):
            with ctx.open_group() as group:
                if ctx.rank == 1:
                    raise ZeroDivisionError("on purpose")

                with pytest.raises(PeerLostError, match="rank 1"):
                    group.barrier(timeout=LIMIT)

        with use_backend(group="gloo"), pytest.raises(RankFailedError, match="rank 1 of 2 failed with ZeroDivision"):
            spawn(rank, 2, timeout=2 * LIMIT)


class TestProcesses:
    def run(self, case):
        done = subprocess.run(
            [sys.executable, "-P", str(PROGRAM), case, "cpu", "cpu"], capture_output=True, text=True, timeout=3 * LIMIT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_values(self):
        assert self.run("values") == "right\nright\n"

    def test_killed_rank_is_named(self):
        out = self.run("killed")
        assert "all_reduce(float32[4], sum): rank 1 (pid" in out or "barrier: rank 1 (pid" in out, out
        assert "was lost: its process ended without a goodbye" in out

    def test_late_rank_is_named(self):
        out = self.run("late")
        assert "rank 1 had not come after 0.5 s" in out
        assert "last calls (late: rank 1):" in out
        assert "rank 1: #1 all_reduce(float32[4], sum)" in out

    def test_rank_that_raises_ends_the_others(self):
        assert "rank 1 of 2 failed with ZeroDivisionError: on purpose" in self.run("raises")
