"""The samedevice group on a GPU: its c10d surface is ordered with the ranks' streams, and the host waits for none."""

import time
from collections import defaultdict, deque
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from dtorch_core import _events

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_gpu_ranks import GPU, LIMIT, LONG, busy, on_ranks, part, warm

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


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
                monkeypatch.setattr(_events, "_pools", defaultdict(deque))  # none that could be used again
                monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options))

            pg.barrier().wait()
            for _ in range(10):
                pg.allreduce([x], options).wait()

            pg.barrier().wait()
            if pg.rank() == 0:
                monkeypatch.undo()

            pg.barrier().wait()

        on_ranks(body, own=False)
        assert not made
