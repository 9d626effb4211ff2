"""Joint work over the four steps that a rank gives up: who is late learns so, and what has begun is not given up."""

import threading
import time
from pathlib import Path

import pytest
import torch

from dtorch_core import AbortedError, StoreTimeoutError
from dtorch_core.testing import Background, asleep

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import four_steps
    from four_steps import LIMIT, add_up, held_back, held_until, on_ranks

registered = four_steps.registered


class TestGivenUp:
    @pytest.mark.parametrize("late", [0, 1, 2])
    def test_late_rank_learns_who_gave_up(self, late):
        """Also when it is the rank that does the work for all; the others wait until their own deadlines."""
        gave_up = threading.Barrier(3)

        def body(store):
            tensor = torch.full((2,), float(store.rank))
            store.barrier()  # who comes later than another one has given up is late
            if store.rank != late:
                deadline = 0.1 if store.rank == (late + 1) % 3 else 0.4
                begun = time.monotonic()
                with pytest.raises(StoreTimeoutError, match=f"rank {late}"):
                    store.post("late", "", (tensor,), add_up).wait(deadline)

                assert 0.9 * deadline < time.monotonic() - begun < LIMIT / 2

            gave_up.wait(LIMIT)
            for key in ("late" if store.rank == late else "later", "later still"):
                with pytest.raises(AbortedError, match="gave up on late") as caught:
                    store.post(key, "", (tensor,), add_up).wait(LIMIT / 2)

                assert f"rank {late} gave up" not in str(caught.value)
                gave_up.wait(LIMIT)

            assert tensor.eq(store.rank).all(), "nobody's tensor was touched"
            gave_up.wait(LIMIT)

        on_ranks(body, 3)

    @pytest.mark.parametrize("first", [0, 1, 2])
    @pytest.mark.parametrize("behind", [1, 2])
    def test_late_rank_and_news_of_who_gave_up_that_is_still_on_its_way(self, first, behind):
        """Nothing depends on when that news is read: the work asks every rank whether it is still in."""
        late = (first + behind) % 3
        gave_up, over = threading.Event(), threading.Barrier(3)

        def body(store):
            arrive = held_back(store, "joint/retired")
            tensor = torch.full((2,), float(store.rank))
            if store.rank == first:
                with pytest.raises(StoreTimeoutError):
                    store.post("late", "", (tensor,), add_up).wait(0.1)

                gave_up.set()
            else:
                if store.rank == late:
                    assert gave_up.wait(LIMIT)

                ticket = store.post("late", "", (tensor,), add_up)
                with pytest.raises(AbortedError, match=f"rank {first} gave up on late"):
                    ticket.wait(LIMIT / 2)

            over.wait(LIMIT)
            assert tensor.eq(store.rank).all(), "it was its own rank's again"
            over.wait(LIMIT)
            arrive()

        on_ranks(body, 3)

    def test_later_call_names_who_gave_up_when_that_news_comes_while_it_waits(self):
        waits = threading.Event()

        def body(store):
            if store.rank == 1:
                arrive = held_back(store, "joint/retired")
                with pytest.raises(StoreTimeoutError):
                    store.post("one", "", (), add_up).wait(0.05)

                assert waits.wait(LIMIT)
                arrive()
            else:
                ticket = store.post("two", "", (), add_up)
                call = Background(lambda: ticket.wait(0.5))
                asleep(call)
                waits.set()
                with pytest.raises(AbortedError, match="two: rank 1 gave up on one"):
                    call.result(LIMIT)

            store.barrier()

        on_ranks(body)

    def test_nobody_gives_up_work_that_has_begun(self):
        """It writes to every rank's tensors, and ends by itself."""
        begun, release = threading.Event(), threading.Event()
        held = held_until(begun, release)

        def body(store):
            tensor = torch.ones(2)
            ticket = store.post("slow", "", (tensor,), held)
            assert begun.wait(LIMIT)
            call = Background(lambda: ticket.wait(0.05))
            asleep(call)
            store.barrier()
            call.thread.join(0.2)
            assert call.thread.is_alive()
            store.barrier()
            release.set()
            call.result(LIMIT)
            assert tensor.tolist() == [3.0, 3.0]

        on_ranks(body, 3)

    def test_rank_0_gives_up_on_a_rank_that_has_come_and_does_not_answer(self):
        """The others have said that they are in, and are told at once."""
        gave_up, over = threading.Event(), threading.Barrier(3)

        def body(store):
            silent = held_back(store, "/in/") if store.rank == 2 else None
            tensor = torch.full((2,), float(store.rank))
            ticket = store.post("silent", "", (tensor,), add_up)
            if store.rank == 0:
                with pytest.raises(StoreTimeoutError, match="rank 1, rank 2 had come, but did not all answer"):
                    ticket.wait(0.2)

                gave_up.set()
            else:
                assert gave_up.wait(LIMIT)
                with pytest.raises(AbortedError, match="rank 0 gave up on silent"):
                    ticket.wait(LIMIT / 2)

            if silent:
                silent()

            over.wait(LIMIT)
            assert tensor.eq(store.rank).all()

        on_ranks(body, 3)

    @pytest.mark.parametrize("first", [0, 1])
    def test_work_that_nobody_waits_for_is_given_up_at_the_stores_timeout(self, first):
        told = threading.Event()

        def body(store):
            if store.rank == first:
                store.post("dropped", "", (), add_up).add_done_callback(told.set)

            assert told.wait(LIMIT)
            store.barrier()
            for key in ("next" if store.rank == first else "dropped", "last"):
                with pytest.raises(AbortedError, match=f"rank {first} gave up on dropped"):
                    store.post(key, "", (), add_up).wait(0.9)

            store.barrier()

        on_ranks(body, 2, timeout=1.0)
