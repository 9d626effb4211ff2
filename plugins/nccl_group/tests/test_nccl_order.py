"""In which order ranks begin their calls. torch's Gloo takes NCCL's place."""

import gc
import importlib.util
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import AbortedError, StoreTimeoutError
from dtorch_core.testing import Background

_spec = importlib.util.spec_from_file_location("nccl_ranks", Path(__file__).with_name("nccl_ranks.py"))
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
