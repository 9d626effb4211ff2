"""The samedevice group on a GPU: its c10d surface is ordered with the ranks' streams, and the host waits for none."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtorch_core import CollectiveMismatchError, UnsupportedTensorError
from dtorch_core.testing import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LIMIT = 30.0
LONG = 400_000_000
"""Clock cycles: about 200 ms."""

GPU = "cuda:0"
STREAMS = pytest.mark.parametrize("own", [True, False], ids=["own streams", "default stream"])


def on_ranks(body, world_size=2, own=True):
    """``body(process_group, group)`` on every rank, with a stream of the rank's own as the current one, or none."""

    def rank(ctx):
        with ctx.open_group("own", backend="samedevice", timeout=LIMIT) as group:
            with torch.cuda.stream(torch.cuda.Stream() if own else None):
                result = body(group.process_group, group)
                torch.cuda.current_stream().synchronize()
                return result

    return run_ranks(rank, world_size, 2 * LIMIT, devices=GPU)


def part(rank, *shape, dtype=torch.float32):
    """Values that differ by position and rank."""
    return torch.arange(torch.Size(shape).numel(), device=GPU).add(1000 * (rank + 1)).to(dtype).reshape(shape)


def warm(pg, *sizes):
    """Load the kernels and allocate the memory: either may wait for the device."""
    for size in sizes:
        x, n = part(pg.rank(), size), pg.size()
        pg.allreduce([x.clone()]).wait()
        pg.allgather([[torch.zeros_like(x) for _ in range(n)]], [x]).wait()
        x.clone().fill_(-1)

    torch.cuda._sleep(1)
    torch.cuda.current_stream().synchronize()
    pg.barrier().wait()


def busy():
    event = torch.cuda.Event()
    event.record()
    return not event.query()


class TestTheSameCallAgain:
    def test_on_other_tensors_and_another_stream(self):
        """What was planned for the first call is used for the next ones; order is each call's own."""

        def body(pg, group):
            warm(pg, 1000)
            ranks = range(pg.size())
            for turn in range(4):
                with torch.cuda.stream(torch.cuda.Stream() if turn % 2 else torch.cuda.current_stream()):
                    mine = part(pg.rank(), 1000) + turn
                    reduced, outputs = torch.zeros(1000, device=GPU), [torch.zeros(1000, device=GPU) for _ in ranks]
                    if pg.rank() == turn % pg.size():
                        torch.cuda._sleep(LONG // 4)

                    reduced.copy_(mine)
                    pg.allreduce([reduced], c10d.AllreduceOptions()).wait()
                    pg.allgather([outputs], [mine], c10d.AllgatherOptions()).wait()
                    mine.fill_(-1)
                    assert torch.equal(reduced, sum(part(r, 1000) + turn for r in ranks))
                    assert all(torch.equal(outputs[r], part(r, 1000) + turn) for r in ranks)

        on_ranks(body)

    def test_on_the_cpu_after_the_gpu_is_another_call(self):
        def body(pg, group):
            ranks = range(pg.size())
            for device in (GPU, "cpu", GPU, "cpu"):
                x = part(pg.rank(), 1000).to(device)
                pg.allreduce([x], c10d.AllreduceOptions()).wait()
                assert torch.equal(x.cpu(), sum(part(r, 1000) for r in ranks).cpu())

        on_ranks(body)


class TestOrder:
    @pytest.mark.parametrize("late", [0, 1, 2])
    def test_in_place_reduction_behind_a_slow_kernel(self, late):
        def body(pg, group):
            warm(pg, 1000)
            x = torch.zeros(1000, device=GPU)
            if pg.rank() == late:
                torch.cuda._sleep(LONG)

            x.copy_(part(pg.rank(), 1000))
            work = pg.allreduce([x])
            assert work.wait(timedelta(seconds=LIMIT))
            assert busy(), "the host waited"
            copy = x.clone()
            x.fill_(-1)
            assert work.is_completed()
            torch.cuda.current_stream().synchronize()
            assert torch.equal(copy, sum(part(r, 1000) for r in range(3)))

        on_ranks(body, 3)

    def test_call_returns_while_its_stream_is_busy(self):
        def body(pg, group):
            warm(pg, 1000)
            begun = time.monotonic()
            torch.cuda._sleep(LONG)
            works = [pg.allreduce([part(pg.rank(), 1000)]) for _ in range(20)]
            for work in works:
                work.wait()

            assert time.monotonic() - begun < 0.15, "the host waited"

        on_ranks(body)

    def test_ranks_that_take_turns_at_being_late(self):
        def body(pg, group):
            x = torch.zeros(1000, dtype=torch.int64, device=GPU)
            warm(pg, 1000)
            for turn in range(30):
                torch.cuda._sleep(3_000_000 if turn % 3 == pg.rank() else 10)
                x.copy_(part(pg.rank(), 1000, dtype=torch.int64) + turn)
                pg.allreduce([x]).wait()
                pg.broadcast([x], turn % 3).wait()
                x.mul_(2)
                pg.allreduce([x]).wait()
                wanted = 6 * (sum(part(r, 1000, dtype=torch.int64) for r in range(3)) + 3 * turn)
                assert torch.equal(x, wanted)

        on_ranks(body, 3)

    def test_future_records_the_stream_of_its_callback(self):
        def body(pg, group):
            warm(pg, 1000)
            x = torch.zeros(1000, device=GPU)
            torch.cuda._sleep(LONG)
            x.copy_(part(pg.rank(), 1000))
            future = pg.allreduce([x]).get_future().then(lambda done: done.value()[0] * 2)
            with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
                assert torch.equal(future.wait(), 2 * (part(0, 1000) + part(1, 1000)))

        on_ranks(body)


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


class TestBlockingCallsOnTheDefaultStream:
    def test_in_place_reduction_behind_a_slow_kernel(self):
        def body(pg, group):
            warm(pg, 1000)
            x = torch.zeros(1000, device=GPU)
            torch.cuda._sleep(LONG)
            x.copy_(part(pg.rank(), 1000))
            work = pg.allreduce([x])
            assert work.wait(timedelta(seconds=LIMIT))
            copy = x.clone()
            assert busy(), "the host waited"
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):
                work.wait()
                late = x.clone()

            torch.cuda.current_stream().wait_stream(other)
            x.fill_(-1)
            for found in (copy, late):
                assert torch.equal(found, part(0, 1000) + part(1, 1000))

        on_ranks(body, own=False)

    def test_one_rank_is_on_another_stream(self):
        def body(pg, group):
            warm(pg, 1000)
            own = torch.cuda.Stream() if pg.rank() else None
            with torch.cuda.stream(own):
                warm(pg, 1000)
                for turn in range(20):
                    x = torch.zeros(1000, device=GPU)
                    torch.cuda._sleep(3_000_000 if turn % 2 == pg.rank() else 10)
                    x.copy_(part(pg.rank(), 1000) + turn)
                    pg.allreduce([x]).wait()
                    copy = x.clone()
                    x.fill_(-1)
                    assert torch.equal(copy, part(0, 1000) + part(1, 1000) + 2 * turn)

        on_ranks(body, own=False)

    def test_makes_no_events(self, monkeypatch):
        """They would order nothing, and cost as much as the collective."""
        made = []

        def body(pg, group):
            options = c10d.AllreduceOptions()
            options.asyncOp = False
            x = part(pg.rank(), 1000)
            pg.allreduce([x], options).wait()
            pg.barrier().wait()
            if pg.rank() == 0:
                monkeypatch.setattr(torch.cuda, "Event", lambda *args: made.append(args))

            pg.barrier().wait()
            for _ in range(10):
                pg.allreduce([x], options).wait()

            pg.barrier().wait()
            if pg.rank() == 0:
                monkeypatch.undo()

            pg.barrier().wait()

        on_ranks(body, own=False)
        assert not made


class TestValues:
    @pytest.mark.parametrize("world_size", [2, 4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
    def test_large_reduction_is_bitwise_equal_on_every_rank(self, world_size, dtype):
        size = (1 << 24) + 3

        def body(pg, group):
            generator = torch.Generator(GPU).manual_seed(pg.rank())
            x = torch.randint(-1000, 1000, (size,), device=GPU, generator=generator).div(7).to(dtype)
            pg.allreduce([x]).wait()
            return x

        first, *others = on_ranks(body, world_size)
        wide = torch.float32 if dtype.is_floating_point else torch.int64
        wanted = torch.zeros(size, device=GPU, dtype=wide)
        for rank in range(world_size):
            generator = torch.Generator(GPU).manual_seed(rank)
            wanted += torch.randint(-1000, 1000, (size,), device=GPU, generator=generator).div(7).to(dtype)

        assert torch.equal(first, wanted.to(dtype))
        assert all(torch.equal(first.view(torch.uint8), other.view(torch.uint8)) for other in others)

    def test_cpu_tensors_travel_too(self):
        """As those of torch's object collectives do."""

        def body(pg, group):
            x = torch.arange(5.0) + pg.rank()
            pg.allreduce([x]).wait()
            assert torch.equal(x, 2 * torch.arange(5.0) + 1)
            assert torch.equal(group.all_gather(torch.arange(3) + pg.rank()), torch.tensor([0, 1, 2, 1, 2, 3]))
            out = [None, None]
            dist.all_gather_object(out, {"rank": pg.rank()}, group=pg)
            assert out == [{"rank": 0}, {"rank": 1}]

        on_ranks(body)

    def test_devices_that_differ_are_no_wrong_values(self):
        def body(pg, group):
            x = part(pg.rank(), 3) if pg.rank() else part(pg.rank(), 3).cpu()
            with pytest.raises(CollectiveMismatchError, match=r"rank 1: all_reduce\(float32\[3\], sum\) on cuda:0"):
                pg.allreduce([x]).wait()

            with pytest.raises(UnsupportedTensorError, match="cpu, cuda:0"):
                pg.allreduce([part(0, 3), part(0, 3).cpu()])

            pg.barrier().wait()

        on_ranks(body)

    def test_memory_of_the_work_is_let_go(self):
        def body(pg, group):
            for _ in range(5):
                x = part(pg.rank(), 1 << 20)
                pg.allreduce([x]).wait()

        on_ranks(body)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        on_ranks(body)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
