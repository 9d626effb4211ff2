"""NCCL itself, on two or more GPUs: pytest plugins/nccl_group/tests/test_nccl_cuda.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import (
    AbortedError,
    NoBackendError,
    PeerLostError,
    RankFailedError,
    StoreTimeoutError,
    UnsupportedOperationError,
    UnsupportedTensorError,
    redistribute_mesh,
    spawn,
    use_backend,
)
from dtorch_core.testing import Background, ThreadGroupTests, run_ranks

GPUS = torch.cuda.device_count() if dist.is_available() and dist.is_nccl_available() else 0
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(GPUS < 2, reason=f"NCCL takes a GPU for each rank, and there are {GPUS} that it can use"),
]
PROGRAM = Path(__file__).with_name("nccl_ranks.py")
LIMIT = 60.0
LONG = 400_000_000
"""Clock cycles: about 200 ms."""

_spec = importlib.util.spec_from_file_location("nccl_ranks", PROGRAM)
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)


def devices(world_size):
    return [f"cuda:{rank}" for rank in range(world_size)]


def on_ranks(body, world_size=2, timeout=LIMIT):
    def rank(ctx):
        with ctx.open_group(backend="nccl", timeout=timeout) as group:
            return body(group)

    return run_ranks(rank, world_size, 2 * LIMIT, devices=devices(world_size))


def part(rank, device, *shape):
    return ranks.part(rank, device, *shape)


@pytest.fixture(scope="module", autouse=True)
def nccl_is_awake():
    """What NCCL keeps for the whole process, sockets and pipes, comes with the first group, and not in a test."""
    on_ranks(lambda group: group.all_to_all(part(group.rank, group.device, 2), 0, 0))


class TestKit(ThreadGroupTests):
    """Every collective, by the kit. Ranks are threads."""

    backend = "nccl"
    patience = LIMIT


class TestSelection:
    def test_a_gpu_each_is_nccl(self):
        assert set(run_ranks(lambda ctx: ctx.open_group().backend, 2, LIMIT, devices=devices(2))) == {"nccl"}

    def test_a_gpu_that_is_shared_is_refused_by_name(self):
        def rank(ctx):
            with pytest.raises(NoBackendError, match=r"rank 0 and rank 1 share cuda:0 \(.+\): NCCL refuses that"):
                ctx.open_group(backend="nccl", timeout=LIMIT)

        run_ranks(rank, 2, LIMIT, devices="cuda:0")

    def test_a_group_of_one_rank(self):
        def body(group):
            x = part(0, group.device, 3)
            assert torch.equal(group.all_reduce(x), x)
            assert torch.equal(group.all_gather(x), x)

        on_ranks(body, 1)

    def test_what_is_on_another_device_is_refused(self):
        there = threading.Barrier(2, timeout=LIMIT)

        def body(group):
            other = f"cuda:{1 - group.rank}"
            elsewhere = torch.zeros(3, device=other)
            there.wait()  # its memory may take the GPU a wait for NCCL's kernel there, which would wait for this rank
            with pytest.raises(UnsupportedOperationError, match="does not declare 'cpu'"):
                group.all_reduce(torch.zeros(3))

            with pytest.raises(UnsupportedTensorError, match=f"the tensor is on {other}"):
                group.all_reduce(elsewhere)

            assert group.all_reduce(torch.ones(3, device=group.device)).tolist() == [2, 2, 2]

        on_ranks(body)


class TestFailure:
    def test_late_rank_times_out_by_name_where_the_host_next_waits(self):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                assert over.wait(LIMIT)
                with pytest.raises(AbortedError, match="rank 0 gave up"):
                    group.barrier()

                return ""

            x = part(0, group.device, 4)
            group.all_reduce(x, timeout=1)
            with pytest.raises(StoreTimeoutError, match="rank 1 had not come") as caught:
                group.barrier(timeout=2)

            over.set()
            return str(caught.value)

        text = on_ranks(body)[0]
        assert "rank 0: #2 barrier" in text
        assert "rank 1: #0 nothing" in text

    def test_result_that_never_comes_is_raised_at_the_end(self):
        over = threading.Event()

        def rank(ctx):
            group = ctx.open_group(backend="nccl", timeout=LIMIT)
            if ctx.rank == 1:
                assert over.wait(LIMIT)
                group.abort("rank 1 has seen enough")
                group.close()
                return

            begun = time.monotonic()
            with pytest.raises(StoreTimeoutError, match="rank 1: #0 nothing"), group:
                group.all_reduce(part(0, ctx.device, 4), timeout=2)
                torch.cuda.synchronize(ctx.device)  # the kernel is ended, and leaves anything

            assert time.monotonic() - begun < 20
            over.set()

        run_ranks(rank, 2, 2 * LIMIT, devices=devices(2))

    @pytest.mark.parametrize("how", ["raises", "aborts"])
    def test_kernels_end_at_once_when_a_rank_ends(self, how):
        queued = threading.Event()

        def rank(ctx):
            group = ctx.open_group(backend="nccl", timeout=LIMIT)
            if ctx.rank == 1:
                assert queued.wait(LIMIT)
                if how == "aborts":
                    group.abort("rank 1 has had enough")
                    group.close()
                    return

                with pytest.raises(ZeroDivisionError), group:
                    raise ZeroDivisionError("on purpose")

                return

            error = PeerLostError if how == "raises" else AbortedError
            with pytest.raises(error, match="rank 1"), group:
                group.all_reduce(part(0, ctx.device, 4))
                waits = Background(lambda: torch.cuda.synchronize(ctx.device))
                queued.set()
                waits.result(20)  # far from the timeout
                with pytest.raises(error, match="rank 1"):
                    group.barrier()

                raise error("rank 1: told")

        run_ranks(rank, 2, 2 * LIMIT, devices=devices(2))

    def test_failed_rank_ends_the_run(self):
        def rank(ctx):
            with ctx.open_group(backend="nccl", timeout=LIMIT) as group:
                if ctx.rank == 1:
                    raise ZeroDivisionError("on purpose")

                group.all_reduce(part(0, ctx.device, 4))
                torch.cuda.synchronize(ctx.device)
                group.barrier()

        begun = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 1 of 2 failed with ZeroDivisionError"):
            run_ranks(rank, 2, 2 * LIMIT, devices=devices(2))

        assert time.monotonic() - begun < 30

    def test_root_that_closes_first_takes_nothing_away(self):
        """A broadcast is over on its root before the others have begun."""

        def body(group):
            for turn in range(10):
                part_of = group.split([0, 1])
                with part_of:
                    if group.rank == 1:
                        torch.cuda._sleep(LONG // 10)

                    x = part(turn if group.rank == 0 else 99, group.device, 1 << 20)
                    got = part_of.broadcast(x, 0)
                    if group.rank == 0:
                        continue

                    assert torch.equal(got, part(turn, group.device, 1 << 20))

        on_ranks(body)


class TestSeveralGroups:
    def test_meshes_through_the_manager(self):
        from torch.distributed.tensor import Partial, Replicate, Shard

        n = 4 if GPUS >= 4 else 2
        mesh = [[0, 1], [2, 3]] if n == 4 else [[0, 1]]
        dense = torch.arange(80.0).reshape(8, 10)

        def rank(ctx):
            with ctx.open_manager() as manager:
                row, column = divmod(ctx.rank, 2)
                mine = dense.chunk(n // 2, 0)[row].chunk(2, 1)[column].to(ctx.device)
                there = [Shard(0), Shard(1)]
                for target in ([Replicate(), Replicate()], [Shard(1), Shard(0)], [Replicate(), Partial()]):
                    moved = redistribute_mesh(mine, manager, mesh, there, target)
                    back = redistribute_mesh(moved, manager, mesh, target, there)
                    assert torch.equal(back, mine)

                assert manager.groups_for(mesh, 1).backend == "nccl"

        run_ranks(rank, n, 2 * LIMIT, devices=devices(n))

    def test_groups_are_closed_in_different_orders(self):
        def body(group):
            parts = [group.split([0, 1]) for _ in range(3)]
            x = part(group.rank, group.device, 1 << 16)
            total = part(0, group.device, 1 << 16) + part(1, group.device, 1 << 16)
            for number, each in enumerate(parts):
                assert torch.equal(each.all_reduce(x + number), total + 2 * number)

            for each in parts if group.rank == 0 else reversed(parts):
                each.close()

        on_ranks(body)

    def test_many_groups_make_their_first_calls(self):
        """All ranks at once: torch 2.11 keeps its groups in a map without a lock."""

        def body(group):
            groups, x = [group.split([0, 1]) for _ in range(16)], part(0, group.device, 3)
            for number, each in enumerate(groups):
                assert torch.equal(each.all_reduce(x + number), 2 * (x + number))

        on_ranks(body)

    def test_groups_one_after_another_sum_their_own_values(self):
        """Each has other ones, of other sizes: what an earlier communicator left in its buffers would show."""
        for turn in range(20):

            def body(group, turn=turn):
                for call in range(12):
                    x = part(group.rank, group.device, 1 + (7 * turn + 5 * call) % 40) * (turn + 1) + call
                    total = part(0, "cpu", *x.shape) + part(1, "cpu", *x.shape)
                    assert torch.equal(group.all_reduce(x).cpu(), total * (turn + 1) + 2 * call), (turn, call)

            on_ranks(body)

    def test_calls_of_several_groups_under_way(self):
        def body(group):
            others = [group.split([0, 1]) for _ in range(2)]
            xs = [part(r, group.device, 256) for r in range(2)]
            works = []
            for turn in range(20):
                for each in (group, *others):
                    works.append((each.all_gather(xs[group.rank] + turn, async_op=True), torch.cat(xs) + turn))
                    works.append((each.all_reduce(xs[group.rank] + turn, async_op=True), xs[0] + xs[1] + 2 * turn))

            for work, wanted in works:
                assert torch.equal(work.result(), wanted)

        on_ranks(body)


class TestTorchDistributed:
    @pytest.mark.filterwarnings("ignore:barrier\\(\\). using the device under current context:UserWarning")
    def test_programs_run_on_it_as_threads(self):
        results = spawn(ranks.in_torch, 2, devices=devices(2), torch_distributed=True, timeout=2 * LIMIT)
        assert results == ["right"] * 2

    def test_tensors_of_torch_move_between_placements(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        def rank(ctx):
            mesh = init_device_mesh("cuda", (2,))
            dense = torch.arange(24.0, device=ctx.device).reshape(4, 6)
            for target in ([Shard(1)], [Replicate()], [Shard(0)]):
                moved = distribute_tensor(dense, mesh, [Shard(0)]).redistribute(mesh, target)
                assert torch.equal(moved.full_tensor(), dense)

        spawn(rank, 2, devices=devices(2), torch_distributed=True, timeout=2 * LIMIT)


class TestProcesses:
    def run(self, case):
        begun = time.monotonic()
        command = [sys.executable, "-P", str(PROGRAM), case, *devices(2)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3 * LIMIT)
        assert done.returncode == 0, done.stderr
        print(done.stderr)
        return done.stdout, time.monotonic() - begun

    @pytest.mark.parametrize("case", ["values", "kit", "in_torch"])
    def test_values(self, case):
        assert self.run(case)[0] == "right\nright\n"

    def test_killed_rank_is_named_at_once(self):
        out, lasted = self.run("killed")
        assert "rank 1 (pid" in out and "was lost: its process ended without a goodbye" in out, out
        assert lasted < LIMIT

    def test_late_rank_is_named(self):
        out, _ = self.run("late")
        assert "rank 1 had not come after 0.5 s" in out
        assert "last calls (late: rank 1):" in out

    def test_rank_that_raises_ends_the_others(self):
        out, lasted = self.run("raises")
        assert "rank 1 of 2 failed with ZeroDivisionError: on purpose" in out
        assert lasted < LIMIT

    @pytest.mark.parametrize("backend", ["dtorch", "nccl"])
    def test_a_script_of_torchrun(self, backend):
        """The same script over torch's own backend, which it was written for."""
        script = PROGRAM.with_name("nccl_script.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        done = subprocess.run([*command, backend], capture_output=True, text=True, timeout=3 * LIMIT)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: right" for rank in range(2)]


def test_it_is_asked_for_by_name():
    with use_backend(group="nccl"):
        assert run_ranks(lambda ctx: ctx.open_group().selection.asked_by, 2, LIMIT, devices=devices(2)) == [
            "use_backend", "use_backend"
        ]
