"""The group without a GPU: torch's Gloo in NCCL's place, at the one module that knows NCCL."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dtorch_nccl_group import group as factory
from dtorch_nccl_group.companion import NcclCompanion

from dtorch_core import (
    AbortedError,
    CollectiveMismatchError,
    PeerLostError,
    RankFailedError,
    StoreTimeoutError,
    UnsupportedOperationError,
    redistribute_mesh,
    spawn,
    use_backend,
)
from dtorch_core._groups import c10d
from dtorch_core._groups import notes as _notes
from dtorch_core.extras import companion
from dtorch_core.testing import Background, ThreadGroupTests, run_ranks

PROGRAM = Path(__file__).with_name("nccl_ranks.py")

BRIEF = 4.0
"""Of a group in which a call may stay begun for ever. When Gloo is collected it waits for the end of that, in any later
test, and with the GIL."""

_spec = importlib.util.spec_from_file_location("nccl_ranks", PROGRAM)
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
LIMIT = ranks.GLOO_LIMIT


@pytest.fixture(scope="module", autouse=True)
def registered():
    with ranks.over_gloo():
        yield


@pytest.fixture
def queued(monkeypatch):
    """Calls are over only when somebody has looked, as on a GPU."""
    monkeypatch.setattr(factory, "nccl", ranks.gloo(queued=True))


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


class TestOrder:
    def test_call_does_not_overtake_one_that_waits_for_sizes(self, monkeypatch):
        """What ranks begin, they begin in one order, whenever the others come."""
        begun = {0: [], 1: []}
        come = threading.Event()
        for name in ("allreduce", "alltoall_base", "all_to_all_single"):
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                monkeypatch.setattr(dist.ProcessGroup, name, lambda self, *a, original=original, name=name, **kw: (
                    begun[self.rank()].append("reduce" if name == "allreduce" else "gather"), original(self, *a, **kw)
                )[1])

        def body(group):
            rank = group.rank
            if rank == 1:
                assert come.wait(LIMIT)

            gathered = group.all_gather(part(rank, 1 + rank), async_op=True)
            reduced = group.all_reduce(part(rank, 3), async_op=True)
            if rank == 0:
                assert begun[0] == []
                come.set()

            assert torch.equal(reduced.result(), part(0, 3) + part(1, 3))
            assert torch.equal(gathered.result(), torch.cat([part(0, 1), part(1, 2)]))

        on_ranks(body)
        assert begun == {0: ["gather", "reduce"], 1: ["gather", "reduce"]}

    @pytest.mark.parametrize("how", ["waited for", "left alone"])
    def test_no_rank_begins_the_call_of_another(self, monkeypatch, how):
        """NCCL connects two ranks when they first need it: a call then begins on none before it has on all."""
        beginning, begun = threading.Barrier(2), threading.Barrier(3)

        def connected(original):
            def call(self, *args, **kwargs):
                beginning.wait(LIMIT)
                work = original(self, *args, **kwargs)
                begun.wait(LIMIT)
                return work

            return call

        for name in ("alltoall_base", "all_to_all_single"):
            if hasattr(dist.ProcessGroup, name):
                monkeypatch.setattr(dist.ProcessGroup, name, connected(getattr(dist.ProcessGroup, name)))

        def body(group):
            rank = group.rank
            work = group.all_gather(part(rank, 1 + rank), async_op=True)
            if how == "left alone" and rank == 0:
                begun.wait(LIMIT)  # in other threads, since nobody waits here
            elif how == "waited for":
                waits = Background(work.wait)
                if rank == 0:
                    begun.wait(LIMIT)

                waits.result(LIMIT)

            assert torch.equal(work.result(), torch.cat([part(0, 1), part(1, 2)]))

        on_ranks(body)

    def test_work_is_the_callers_alone(self):
        """It goes with the caller's last reference, and its result with it: no garbage collector sees a GPU fill."""
        held = []

        def body(group):
            for call in (
                lambda: group.all_gather(part(group.rank, 1 + group.rank), async_op=True),
                lambda: group.all_reduce(part(group.rank, 3), async_op=True),
            ):
                work = call()
                work.wait()
                known = weakref.ref(work)
                del work
                group.barrier()  # the thread that began it has left it by then
                if known() is not None:
                    held.append(known())

        gc.disable()
        try:
            on_ranks(body)
        finally:
            gc.enable()

        assert not held

    def test_call_whose_turn_does_not_come_times_out(self):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                assert over.wait(LIMIT)
                return

            group.all_gather(part(0, 3), async_op=True)
            with pytest.raises(StoreTimeoutError, match="an earlier call of this rank had not begun after 0.2 s"):
                group.all_reduce(part(0, 3), timeout=0.2)

            with pytest.raises(AbortedError, match="rank 0 gave up on all_reduce"):
                group.barrier()

            over.set()

        on_ranks(body)

    def test_callback_of_a_future_may_call_collectives(self):
        asked = threading.Event()

        def body(group):
            if group.rank == 1:
                assert asked.wait(LIMIT)

            future = group.barrier(async_op=True).get_future()
            reduced = future.then(lambda _: group.all_reduce(part(group.rank, 3)))
            asked.set()
            assert torch.equal(reduced.wait(), part(0, 3) + part(1, 3))

        on_ranks(body, timeout=5.0)


class TestFailure:
    def test_timeout_shows_who_called_what(self):
        over = threading.Event()

        def body(group):
            group.all_reduce(part(group.rank, 3))
            if group.rank == 0:
                group.barrier()
                with pytest.raises(StoreTimeoutError) as caught:
                    group.all_gather(part(0, 3), timeout=0.2)

                over.set()
                return str(caught.value)

            group.barrier()
            assert over.wait(LIMIT)
            return ""

        text = on_ranks(body)[0]
        assert "rank 1 had not come after 0.2 s" in text
        assert "last calls (late: rank 1):" in text
        assert "rank 0: #3 all_gather(float32[3], dim=0)" in text
        assert "rank 1: #2 barrier" in text

    def test_timeout_of_the_collective_itself_shows_who_called_what(self):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                assert over.wait(LIMIT)
                with pytest.raises(AbortedError, match=r"rank 0 gave up on all_reduce\(float32\[3\], sum\)"):
                    group.all_reduce(part(1, 3))

                return ""

            with pytest.raises(StoreTimeoutError) as caught:
                group.all_reduce(part(0, 3), timeout=0.2)

            over.set()
            return str(caught.value)

        text = on_ranks(body)[0]
        assert "rank 0: #1 all_reduce(float32[3], sum)" in text
        assert "rank 1: #0 nothing" in text

    def test_ranks_that_are_out_of_step_are_told(self):
        def body(group):
            if group.rank == 0:
                group.all_reduce(part(0, 3), async_op=True, timeout=0.5)

            with pytest.raises(CollectiveMismatchError, match="#2 barrier") as caught:
                group.barrier()

            assert "#1 barrier" in str(caught.value)
            group.abort("out of step")

        on_ranks(body)

    def test_call_that_one_rank_refuses_ends_the_others(self):
        refused = threading.Event()

        def body(group):
            if group.rank == 1:
                with pytest.raises(TypeError):
                    group.all_reduce("text")

                refused.set()
                return

            assert refused.wait(LIMIT)
            with pytest.raises(CollectiveMismatchError, match=r"rank 1 refused its part: all_reduce\(str"):
                group.all_reduce(part(0, 3))

            with pytest.raises(CollectiveMismatchError, match="rank 1"):
                group.barrier()

        on_ranks(body, timeout=BRIEF)

    def test_call_that_every_rank_refuses_late_ends_no_later_one(self):
        """One rank has made its next call by then, which is not the one that it refuses."""
        called, refused = threading.Event(), threading.Event()

        def body(group):
            rank = group.rank
            if rank == 0:
                gathered = group.all_gather(part(0, 2, 3), async_op=True)
                reduced = group.all_reduce(part(0, 3), async_op=True)
                called.set()
                with pytest.raises(CollectiveMismatchError, match="do not fit"):
                    gathered.result()

                refused.set()
                assert torch.equal(reduced.result(), part(0, 3) + part(1, 3))
            else:
                assert called.wait(LIMIT)
                with pytest.raises(CollectiveMismatchError, match="do not fit"):
                    group.all_gather(part(1, 2, 4))

                assert refused.wait(LIMIT)
                assert torch.equal(group.all_reduce(part(1, 3)), part(0, 3) + part(1, 3))

            assert torch.equal(group.all_reduce(part(rank, 3)), part(0, 3) + part(1, 3))

        on_ranks(body)

    def test_call_that_every_rank_refuses_ends_nobody(self):
        def body(group):
            for _ in range(3):
                with pytest.raises(TypeError):
                    group.all_reduce("text")

                with pytest.raises(ValueError, match="dim 3"):
                    group.all_gather(part(group.rank, 3), 3)

            assert torch.equal(group.all_reduce(part(group.rank, 3)), part(0, 3) + part(1, 3))
            assert torch.equal(group.all_gather(part(group.rank, 3)), torch.cat([part(0, 3), part(1, 3)]))

        on_ranks(body)

    def test_rank_that_left_is_named_in_every_later_collective(self):
        left = threading.Event()

        def body(group):
            group.barrier()
            if group.rank == 1:
                group.close()
                left.set()
                return

            assert left.wait(LIMIT)
            for call in (lambda: group.all_reduce(part(0, 3)), group.barrier):
                with pytest.raises(PeerLostError, match=r"rank 1 .* has left group '\w+' .* after its call #1"):
                    call()

        on_ranks(body)

    def test_rank_that_leaves_while_a_call_begins_is_named(self, monkeypatch):
        begun, left = threading.Event(), threading.Event()
        turn, heard = NcclCompanion.turn, NcclCompanion._on_leaving

        def on_leaving(self, *args):
            heard(self, *args)
            left.set()

        def late(self, call, ticket):
            begun.set()
            assert left.wait(LIMIT)
            return turn(self, call, ticket)

        monkeypatch.setattr(NcclCompanion, "_on_leaving", on_leaving)
        monkeypatch.setattr(NcclCompanion, "turn", late)

        def body(group):
            if group.rank == 1:
                assert begun.wait(LIMIT)
                return

            with pytest.raises(PeerLostError, match=r"rank 1 .* has left group '\w+' .* after its call #0"):
                group.all_reduce(part(0, 4))

        on_ranks(body, timeout=BRIEF)

    @pytest.mark.parametrize("is_queued", [False, True])
    def test_rank_that_ends_after_the_last_barrier_is_not_missed(self, monkeypatch, is_queued):
        """The one that is slower learns of its end before it is through: all had come, so that all was well."""
        launched = NcclCompanion.launched

        def late(self, *args):
            if self._ctx.rank == 1:
                assert self._is_over.wait(LIMIT)

            launched(self, *args)

        monkeypatch.setattr(NcclCompanion, "launched", late)
        monkeypatch.setattr(factory, "nccl", ranks.gloo(queued=is_queued))

        def rank(ctx):
            group = ctx.open_group(backend="gloo", timeout=LIMIT)
            group.barrier()
            if ctx.rank == 0:  # as at the end of a process that has not closed it
                for store in companion(group.process_group)._stores:
                    store.close()

        run_ranks(rank, 2, 2 * LIMIT)

    def test_result_that_never_comes_is_raised_at_the_end(self, queued):
        """Nobody has waited for it, and nobody may take it for a good one."""
        over = threading.Event()

        def rank(ctx):
            group = ctx.open_group(backend="gloo", timeout=LIMIT)
            if ctx.rank == 1:
                assert over.wait(LIMIT)
                group.abort("rank 1 has seen enough")
                group.close()
                return

            with pytest.raises(StoreTimeoutError, match="rank 1: #0 nothing"), group:
                group.all_reduce(part(0, 3), async_op=True, timeout=0.3)

            over.set()

        run_ranks(rank, 2, 2 * LIMIT)

    def test_close_waits_for_those_who_still_read(self, monkeypatch):
        """A rank can be done with its part before the others are: its memory has to stay until then."""
        released = threading.Event()
        seam = ranks.gloo(queued=True)
        helper = "settles"  # of a rank that is asked whether it is done
        seam.finish = lambda _: released.wait(LIMIT) if helper in threading.current_thread().name else None
        monkeypatch.setattr(factory, "nccl", seam)
        over = threading.Event()

        def body(group):
            assert torch.equal(group.all_reduce(part(group.rank, 3)), part(0, 3) + part(1, 3))
            if group.rank == 0:
                group.close()
                over.set()
                return released.is_set()

            assert not over.wait(0.2)
            released.set()
            return over.wait(LIMIT)

        assert on_ranks(body) == [True, True]

    def test_group_that_cannot_be_built_fails_on_every_rank(self, monkeypatch):
        seam = ranks.gloo()

        def connect(backend, device, timeout):
            raise RuntimeError("no route")

        seam.connect = connect
        monkeypatch.setattr(factory, "nccl", seam)

        def rank(ctx):
            ctx.open_group(backend="gloo", timeout=LIMIT)

        with pytest.raises(RankFailedError, match="no route"):
            run_ranks(rank, 2, 2 * LIMIT)


class TestWithoutAStore:
    """As across hosts: nobody can be asked, and the group itself carries sizes and messages."""

    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch):
        monkeypatch.setattr(factory, "_stores", lambda ctx: None)

    def test_calls_and_messages_work(self):
        def body(group):
            rank = group.rank
            xs = [part(r, 2 + r, 3) for r in range(2)]
            assert torch.equal(group.all_gather(xs[rank]), torch.cat(xs))
            assert torch.equal(group.all_reduce(part(rank, 3)), part(0, 3) + part(1, 3))
            group.barrier()
            group.send(xs[rank], rank)
            assert torch.equal(group.recv(rank), xs[rank])
            if rank:
                group.send(xs[1], 0)
            else:
                assert torch.equal(group.recv(1), xs[1])

        on_ranks(body)

    def test_timeout_says_what_is_known(self):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                assert over.wait(LIMIT)
                return ""

            with pytest.raises(StoreTimeoutError, match="other hosts can't be asked"):
                group.all_reduce(part(0, 3), timeout=0.2)

            over.set()

        on_ranks(body)


    def test_sizes_may_take_no_longer_than_their_call(self, monkeypatch):
        limits, began = {0: [], 1: []}, []
        seam, all_gather = ranks.gloo(), c10d.all_gather
        seam.limit = lambda backend, seconds: limits[backend.rank()].append(seconds)

        def gathering(group, *args):
            began.append(limits[group.rank()][-1:])
            return all_gather(group, *args)

        monkeypatch.setattr(factory, "nccl", seam)
        monkeypatch.setattr(c10d, "all_gather", gathering)

        def body(group):
            gathered = group.all_gather(part(group.rank, 1 + group.rank), timeout=7)
            assert torch.equal(gathered, torch.cat([part(0, 1), part(1, 2)]))

        on_ranks(body)
        assert began == [[7]] * 6, "lengths, texts, and the call"
        assert [each[-1] for each in limits.values()] == [LIMIT] * 2

    def test_sizes_that_never_came_are_not_read(self, monkeypatch):
        """NCCL's kernel ends when its time is over, and has written nothing."""

        class Ended:
            def wait(self):
                return True

            def check_end(self):
                raise RuntimeError("torch's watchdog has ended it: its time was over")

        def body(group):
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "is_cuda", True)
                patch.setattr(c10d, "all_gather", lambda *args: Ended())
                with pytest.raises(RuntimeError, match="its time was over"):
                    _notes._as_bytes(group.process_group, "cpu", "text", 1.0)

        on_ranks(body, 1)


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
