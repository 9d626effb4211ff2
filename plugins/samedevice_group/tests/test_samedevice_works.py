"""The works and futures of c10d: what they say, when they are over, and how long they are waited for."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import AbortedError, CollectiveMismatchError, StoreTimeoutError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import LARGE, LIMIT, on_ranks, options, part


class TestWorks:
    def test_work_follows_c10d(self):
        begun = threading.Event()

        def body(pg, group):
            x = part(pg.rank(), 3)
            if pg.rank() == 1:
                assert begun.wait(LIMIT)

            work = pg.allreduce([x])
            if pg.rank() == 0:
                assert not work.is_completed()
                assert work.exception() is None
                future = work.get_future()
                begun.set()
                (got,) = future.wait()
                assert got.data_ptr() == x.data_ptr()

            assert isinstance(work, dist._Work)
            assert work.wait(timedelta(seconds=LIMIT))
            assert work.wait(LIMIT)
            work.synchronize()
            assert work.is_completed()
            assert work.is_success()
            assert work.result()[0] is x
            assert torch.equal(x, part(0, 3) + part(1, 3))
            doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
            assert torch.equal(doubled, 2 * x)

        on_ranks(body)

    def test_all_to_all_single_gives_its_whole_output(self):
        def body(pg, group):
            given = part(pg.rank(), 4)
            for _ in range(2):  # the second call is not planned again
                out = torch.zeros(4)
                work = pg.all_to_all_single(out, given, [], [])
                (got,) = work.get_future().wait()
                assert got.data_ptr() == out.data_ptr()
                assert torch.equal(got, torch.cat([part(r, 4).chunk(2)[pg.rank()] for r in range(2)]))
                (result,) = work.result()
                assert result is out

        on_ranks(body)

    def test_sequence_number_counts_the_collectives_of_this_rank(self):
        def body(pg, group):
            assert pg._get_sequence_number_for_group() == 0
            pg.allreduce([part(pg.rank(), 3)]).wait()
            assert pg._get_sequence_number_for_group() == 1
            for _ in range(3):
                pg.broadcast([part(0, 3)]).wait()

            pg.barrier().wait()
            assert pg._get_sequence_number_for_group() == 5

        on_ranks(body)

    def test_work_of_a_message_knows_its_source(self):
        def body(pg, group):
            if pg.rank() == 0:
                buffer = torch.zeros(3)
                work = pg.recv_anysource([buffer], 4)
                pg.barrier().wait()
                assert work.wait()
                assert work._source_rank() == work.source_rank() == 2
                assert torch.equal(buffer, part(2, 3))
                assert pg.recv([buffer], 2, 4).wait()
                assert torch.equal(buffer, part(3, 3))
                work = pg.recv([buffer], 2, 4)
                future = work.get_future()
                pg.barrier().wait()
                assert future.wait()[0].data_ptr() == buffer.data_ptr()
                assert torch.equal(buffer, part(4, 3))
                return

            pg.barrier().wait()
            if pg.rank() == 2:
                sent = pg.send([part(2, 3)], 0, 4)
                assert sent.wait() and sent.is_completed() and sent.get_future().wait() == []
                pg.send(part(3, 3), 0, 4).wait()

            pg.barrier().wait()
            if pg.rank() == 2:
                pg.send([part(4, 3)], 0, 4).wait()

        on_ranks(body, 3)

    def test_message_of_as_many_elements_fits_the_buffer_of_c10d(self):
        """torch.distributed.pipelining sends a number without dimensions, and receives one element."""

        def body(pg, group):
            if pg.rank() == 1:
                for message in (torch.tensor(7.0), part(1, 6).view(2, 3).t(), part(2, 6).view(2, 3)):
                    pg.send([message], 0).wait()

                group.send(torch.tensor(7.0), 0)
                return

            number, columns, rows = torch.zeros(1), torch.zeros(6), torch.zeros(6, 1)
            assert pg.recv([number], 1).wait() and number.tolist() == [7.0]
            assert pg.recv_anysource([columns]).wait() and torch.equal(columns.view(3, 2), part(1, 6).view(2, 3).t())
            assert pg.recv([rows], 1).wait() and torch.equal(rows.flatten(), part(2, 6))
            with pytest.raises(CollectiveMismatchError, match=r"rank 1 sent float32\[\].*float32\[1\]"):
                group.recv(1, out=number)

        on_ranks(body)

    def test_message_that_does_not_fit_the_buffer_fails_its_work(self):
        def body(pg, group):
            if pg.rank() == 1:
                pg.send([part(1, 4)], 0).wait()
                return

            work = pg.recv([torch.zeros(3)], 1)
            future = work.get_future()
            with pytest.raises(CollectiveMismatchError, match=r"rank 1 sent float32\[4\]"):
                future.wait()

            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), CollectiveMismatchError)

        on_ranks(body)

    def test_callback_of_a_future_calls_a_collective_and_waits(self):
        asked = threading.Event()

        def body(pg, group):
            if pg.rank() == 1:
                assert asked.wait(LIMIT)  # the other rank's callback is there when this rank's call ends the first

            first = pg.allreduce([part(pg.rank(), 3)]).get_future()
            then = first.then(lambda done: pg.allreduce([done.value()[0] + pg.rank()]).get_future().wait()[0])
            asked.set()
            assert torch.equal(then.wait(), 2 * (part(0, 3) + part(1, 3)) + 1)

        on_ranks(body)

    def test_future_knows_the_timeout(self):
        over = threading.Event()

        def body(pg, group):
            if pg.rank() == 1:
                assert over.wait(LIMIT)
                return

            opts = options("AllreduceOptions", timeout=timedelta(seconds=0.1))
            try:
                with pytest.raises(StoreTimeoutError, match="rank 1 had not come after 0.1 s"):
                    pg.allreduce([part(0, 2)], opts).get_future().wait()
            finally:
                over.set()

        on_ranks(body)

    def test_timeout_of_the_options_and_of_the_wait(self):
        over = threading.Event()

        def body(pg, group):
            if pg.rank() == 1:
                assert over.wait(LIMIT)
                with pytest.raises(AbortedError, match="rank 0 gave up on collective #1, all_reduce"):
                    pg.allreduce([part(1, 2)])

                return

            first = pg.allreduce([part(0, 2)])
            second = pg.allreduce([part(0, 2)], options("AllreduceOptions", timeout=timedelta(seconds=0.1)))
            with pytest.raises(StoreTimeoutError, match="collective #1.*rank 1 had not come after 0.05 s"):
                first.wait(timedelta(seconds=0.05))

            with pytest.raises(AbortedError, match="rank 0 gave up"):
                second.wait()

            over.set()

        on_ranks(body)

    def test_zero_is_no_timeout(self):
        """c10d writes it where a caller names none."""

        def body(pg, group):
            if pg.rank() == 1:
                threading.Event().wait(0.1)

            x = part(pg.rank(), 2)
            assert pg.allreduce([x], options("AllreduceOptions", timeout=timedelta(0))).wait(timedelta(0))
            pg.set_timeout(timedelta(seconds=LIMIT))
            assert pg.barrier().wait()

        on_ranks(body)

    def test_calls_in_flight_on_one_tensor_happen_one_after_the_other(self):
        """Large ones too, which the ranks' threads share."""

        def body(pg, group):
            for size in (3, LARGE):
                for _ in range(10):
                    x = part(pg.rank(), size, dtype=torch.int64)
                    works = []
                    for turn in range(4):
                        works.append(pg.allreduce([x]))
                        works.append(pg.broadcast([x], turn % 3))

                    for work in works if pg.rank() else reversed(works):
                        work.wait()

                    assert torch.equal(x, 27 * sum(part(r, size, dtype=torch.int64) for r in range(3)))

        on_ranks(body, 3)
