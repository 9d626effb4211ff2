"""The samedevice group on a GPU: async calls run beside what the ranks queue next."""

import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_gpu_ranks import GPU, LIMIT, LONG, on_ranks, part, warm

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

STREAMS = pytest.mark.parametrize("own", [True, False], ids=["own streams", "default stream"])


def begun(pg, x):
    """An async all_reduce, as ``dist.all_reduce(x, async_op=True)`` begins it."""
    options = c10d.AllreduceOptions()
    options.asyncOp = True
    return pg.allreduce([x], options)


def mark():
    """When the current stream gets here."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TestAsyncCalls:
    """They run beside what the ranks queue next."""

    @STREAMS
    @pytest.mark.parametrize("asked", [False, True], ids=["waited for", "asked for a future"])
    def test_all_reduce_and_matmuls_at_the_same_time(self, own, asked):
        """By the GPU's clock the collective ends while the matmuls run, which were begun before it ended.

        Everything is queued while the GPU sleeps. On the rank's own stream the matmuls could not begin earlier than the
        collective has ended.
        """
        size, matmuls, there = 1 << 26, 24, threading.Barrier(2, timeout=LIMIT)  # the group's would order the streams

        def body(pg, group):
            x = torch.full((size,), 1.0 + pg.rank(), device=GPU)
            a = torch.full((8192, 8192), 1 / 64, device=GPU, dtype=torch.bfloat16)
            product, watcher = a @ a, torch.cuda.Stream()
            with torch.cuda.stream(watcher):
                mark()

            for _ in range(2):
                begun(pg, x.clone()).wait()

            torch.cuda.synchronize()
            pg.barrier().wait()
            first = mark()
            torch.cuda._sleep(2 * LONG)
            work = begun(pg, x)
            if asked:
                work.get_future()

            # On one stream for both, the matmuls of one rank hold up what the other has not begun yet.
            there.wait()
            started = mark()
            there.wait()
            for _ in range(matmuls):
                torch.mm(a, a, out=product)

            ended = mark()
            with torch.cuda.stream(watcher):
                work.wait()
                done = mark()

            assert not started.query(), "the GPU has got there while it was still being queued: no test of anything"
            for event in (started, ended, done):
                event.synchronize()

            times = [first.elapsed_time(event) for event in (started, done, ended)]
            assert times == sorted(times), "started, all_reduce done, matmuls ended: " + ", ".join(map(str, times))
            assert times[0] < times[1] < times[2]
            work.wait()
            assert torch.equal(x, torch.full_like(x, 3.0))

        on_ranks(body, own=own)

    @STREAMS
    def test_a_barrier_ends_those_whose_work_was_dropped(self, own):
        def body(pg, group):
            begun(pg, torch.zeros(1000, device=GPU)).wait()
            for turn in range(4):
                xs = [torch.zeros(1000, device=GPU) for _ in range(3)]
                torch.cuda._sleep(LONG // 4 * (pg.rank() == turn % 2))
                for number, x in enumerate(xs):
                    x.copy_(part(pg.rank(), 1000) + number)
                    begun(pg, x)

                pg.barrier().wait()
                for number, x in enumerate(xs):
                    assert torch.equal(x, part(0, 1000) + part(1, 1000) + 2 * number), (turn, number)

        on_ranks(body, own=own)

    @STREAMS
    def test_wait_orders_the_current_stream(self, own):
        def body(pg, group):
            warm(pg, 1000)
            begun(pg, part(pg.rank(), 1000)).wait()
            for turn in range(6):
                x = torch.zeros(1000, device=GPU)
                torch.cuda._sleep(LONG // 20 if turn % 2 == pg.rank() else 10)
                x.copy_(part(pg.rank(), 1000) + turn)
                works = [begun(pg, x), begun(pg, part(pg.rank(), 1000))]
                copies = []
                for work in (works[0], *works):
                    assert work.wait()
                    copies.append(x.clone())

                x.fill_(-1)
                wanted = part(0, 1000) + part(1, 1000) + 2 * turn
                assert all(torch.equal(copy, wanted) for copy in copies)

        on_ranks(body, own=own)

    @STREAMS
    def test_one_rank_waits_at_once_and_the_other_does_not(self, own):
        def body(pg, group):
            warm(pg, 1000)
            begun(pg, part(pg.rank(), 1000)).wait()
            for turn in range(20):
                x = torch.zeros(1000, device=GPU)
                torch.cuda._sleep(1_000_000 * (turn % 3))
                x.copy_(part(pg.rank(), 1000) + turn)
                if turn % 2 == pg.rank():
                    begun(pg, x).wait()
                else:
                    pg.allreduce([x]).wait()

                assert torch.equal(x, part(0, 1000) + part(1, 1000) + 2 * turn)

        on_ranks(body, own=own)

    @STREAMS
    def test_memory_of_a_rank_that_does_not_wait_is_kept(self, own):
        """It lets its tensor go, and asks for as much memory at once."""
        size = 1 << 20

        def body(pg, group):
            warm(pg, size)
            begun(pg, part(pg.rank(), size)).wait()
            for turn in range(4):
                torch.cuda.synchronize()
                pg.barrier().wait()
                torch.cuda._sleep(LONG // 4)
                x = part(pg.rank(), size)
                work = begun(pg, x)
                if turn % 2 == pg.rank():
                    del work, x
                    trash = [torch.full((size,), -1.0, device=GPU) for _ in range(4)]
                    pg.barrier().wait()
                    del trash
                else:
                    pg.barrier().wait()
                    work.wait()
                    assert torch.equal(x, part(0, size) + part(1, size))

        on_ranks(body, own=own)

    @STREAMS
    def test_thread_groups_call(self, own):
        def body(pg, group):
            warm(pg, 1000)
            calls = (
                lambda **kw: group.all_reduce(part(pg.rank(), 1000), **kw),
                lambda **kw: group.all_gather(part(pg.rank(), 1000), **kw),
                lambda **kw: group.reduce_scatter(part(pg.rank(), 1000), **kw),
            )
            for call in calls:
                assert torch.equal(call(async_op=True).result(), call())

        on_ranks(body, own=own)
