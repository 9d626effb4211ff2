"""Joint work of the memory store: who does it, who helps, and when a rank may go on."""

import gc
import threading
import time
import traceback
import weakref

import pytest
import torch

from dtorch_core import AbortedError, CollectiveMismatchError, PeerLostError, ProtocolError, StoreTimeoutError
from dtorch_core.testing import Background, asleep, run_ranks

LIMIT = 15.0


def on_ranks(body, world_size=2, timeout=LIMIT):
    def rank(ctx):
        with ctx.open_store("joint", backend="memory", timeout=timeout) as store:
            return body(store)

    return run_ranks(rank, world_size, 2 * LIMIT)


class Wait:
    """A wait for a ticket in the background, so that a test sees it fall asleep."""

    def __init__(self, ticket, come=None):
        self.call = Background(lambda: ticket.wait(LIMIT))
        asleep(self.call)
        if come is not None:
            come.release()


class TestHelp:
    def test_sleepers_share_the_tasks_of_the_last_rank(self):
        come = threading.Semaphore(0)
        together = threading.Barrier(3)
        seen = set()

        def work(offers):
            def task():
                seen.add(threading.get_ident())
                together.wait(LIMIT)  # passes if three threads work at the same time

            return [task] * 3

        def body(store):
            if store.rank == 2:
                for _ in range(2):
                    assert come.acquire(timeout=LIMIT)

            ticket = store.post("k", "", (), work)
            if store.rank < 2:
                Wait(ticket, come).call.result(LIMIT)

            ticket.wait(LIMIT)

        on_ranks(body, 3)
        assert len(seen) == 3

    def test_single_task_is_done_by_the_last_rank(self):
        done_by = []

        def body(store):
            store.barrier()
            if store.rank == 1:
                time.sleep(0.02)

            ticket = store.post("k", "", (), lambda offers: [lambda: done_by.append(threading.current_thread().name)])
            ticket.wait(LIMIT)
            return threading.current_thread().name

        names = on_ranks(body)
        assert len(done_by) == 1 and done_by[0] in names

    def test_post_returns_when_no_other_rank_is_at_a_task_any_more(self):
        """What the last rank posts next may work on the same tensors."""
        come = threading.Semaphore(0)
        helping = threading.Event()
        order = []

        def work(offers):
            me = threading.get_ident()

            def task():
                if threading.get_ident() == me:
                    assert helping.wait(LIMIT)
                else:
                    helping.set()
                    time.sleep(0.1)
                    order.append("the helper's task ended")

            return [task, task]

        def body(store):
            if store.rank == 1:
                assert come.acquire(timeout=LIMIT)
                ticket = store.post("k", "", (), work)
                order.append("post returned")
            else:
                ticket = store.post("k", "", (), work)
                Wait(ticket, come).call.result(LIMIT)

            ticket.wait(LIMIT)

        on_ranks(body)
        assert order == ["the helper's task ended", "post returned"]

    def test_error_of_a_helpers_task_reaches_every_rank(self):
        come = threading.Semaphore(0)
        helping = threading.Event()

        def work(offers):
            me = threading.get_ident()

            def task():
                if threading.get_ident() == me:
                    assert helping.wait(LIMIT)
                else:
                    helping.set()
                    raise ArithmeticError("in the helper")

            return [task, task, task]

        def body(store):
            if store.rank == 1:
                assert come.acquire(timeout=LIMIT)

            ticket = store.post("k", "", (), work)
            if store.rank == 0:
                waiting = Wait(ticket, come)
                with pytest.raises(ArithmeticError, match="in the helper"):
                    waiting.call.result(LIMIT)

            for _ in range(2):
                with pytest.raises(ArithmeticError, match="in the helper"):
                    ticket.wait(LIMIT)

            assert ticket.done()

        on_ranks(body)


class TestKeptErrors:
    """Every rank raises a copy of what the work raised, so it is kept as long as a ticket is."""

    @pytest.fixture
    def no_gc(self):
        """Nothing looks for cycles."""
        collects = gc.isenabled()
        gc.disable()
        yield
        if collects:
            gc.enable()

    @pytest.mark.parametrize("kind", [CollectiveMismatchError, ArithmeticError])
    @pytest.mark.parametrize("in_a_task", [False, True])
    def test_failed_call_keeps_no_tensors(self, no_gc, kind, in_a_task):
        """Nor while its error is kept."""

        def work(offers):
            def task():
                assert len(offers) == 2  # its frame has them all
                raise kind("these do not fit")

            if not in_a_task:
                task()

            return [task, task]

        class Memory(bytearray):
            pass

        def body(store):
            memory = Memory(400)
            seen = weakref.ref(memory)
            tensor = torch.frombuffer(memory, dtype=torch.float32)
            del memory
            ticket = store.post("k", "", (tensor,), work)
            with pytest.raises(kind, match="^these do not fit$") as caught:
                ticket.wait(LIMIT)

            store.barrier()  # nobody is at a task any more
            del tensor
            store.barrier()
            kept = seen() is not None
            store.barrier()
            assert "these do not fit" in str(caught.value)
            return kept

        assert on_ranks(body) == [False, False]

    def test_error_of_no_kind_of_ours_says_once_where_it_was_raised(self):
        """Its copies show it as their cause; one that is ours says in its text what there is to know."""

        def unlucky(kind):
            raise kind("in the work")

        def body(store):
            for kind, notes in ((ArithmeticError, 1), (CollectiveMismatchError, 0)):
                ticket = store.post("k", "", (), lambda offers, kind=kind: unlucky(kind))
                for _ in range(2):
                    with pytest.raises(kind) as caught:
                        ticket.wait(LIMIT)

                    shown = "".join(traceback.format_exception(caught.value))
                    assert shown.count("Raised here:") == shown.count("in unlucky") == notes, shown
                    assert shown.endswith(f"{kind.__name__}: in the work\n"), shown

        on_ranks(body, 3)


class TestTickets:
    def test_rank_brings_its_part_once(self):
        def body(store):
            if store.rank == 0:
                store.post("k", "", (), lambda offers: ())
                with pytest.raises(ProtocolError, match="rank 0 has brought its part already"):
                    store.post("k", "", (), lambda offers: ())

            store.barrier()
            if store.rank == 1:
                store.post("k", "", (), lambda offers: ()).wait(LIMIT)

        on_ranks(body)

    def test_key_is_free_again_once_all_have_come(self):
        def body(store):
            for turn in range(20):
                ticket = store.post("k", f"{turn}", (), lambda offers: ())
                ticket.wait(LIMIT)
                assert list(ticket.notes()) == [f"{turn}"] * 3

        on_ranks(body, 3)

    def test_tensors_are_let_go_with_the_work(self):
        def body(store):
            tensor = torch.arange(1000.0)
            gone = weakref.ref(tensor)
            ticket = store.post("k", "", (tensor,), lambda offers: ())
            ticket.wait(LIMIT)
            store.barrier()
            del tensor
            gc.collect()
            return gone() is None

        assert on_ranks(body) == [True, True]

    def test_wait_for_what_began_lasts_until_it_ends(self):
        """Leaving it would leave this rank's tensors to its writes."""
        begun = threading.Event()

        def work(offers):
            begun.set()
            time.sleep(0.2)
            return ()

        def body(store):
            if store.rank == 1:
                store.post("k", "", (), work).wait(LIMIT)
                return

            ticket = store.post("k", "", (), work)
            assert begun.wait(LIMIT)
            ticket.wait(0.01)
            assert ticket.done()

        on_ranks(body)


class TestEndings:
    def test_retired_joint_work_lets_no_message_begin(self):
        over = threading.Event()

        def body(store):
            if store.rank == 1:
                assert over.wait(LIMIT)
            else:
                with pytest.raises(StoreTimeoutError, match="rank 1 had not come"):
                    store.post("k", "all_reduce", (), lambda offers: ()).wait(0.05)

                over.set()

            for call in (
                lambda: store.post("later", "", (), lambda offers: ()),
                lambda: store.send(torch.ones(1), 1 - store.rank, 0),
                lambda: store.expect(1 - store.rank, 0),
            ):
                with pytest.raises(AbortedError, match="rank 0 gave up on k, all_reduce: rank 1 had not come"):
                    call()

        on_ranks(body)

    def test_callbacks_of_what_cannot_end_are_called(self):
        ready = threading.Barrier(2)

        def body(store, end):
            called = threading.Event()
            if store.rank == 0:
                ticket = store.post("k", "", (), lambda offers: ())
                ticket.add_done_callback(called.set)
                receipt = store.expect(1, 0)
                got = threading.Event()
                receipt.add_done_callback(got.set)
                assert not ticket.done() and not receipt.done()

            ready.wait(LIMIT)
            if store.rank == 1:
                end(store)
                return

            assert called.wait(LIMIT)
            assert got.wait(LIMIT)
            assert ticket.done() and receipt.done()
            for wait in (ticket.wait, receipt.wait):
                with pytest.raises((PeerLostError, AbortedError), match="rank 1|on purpose"):
                    wait(LIMIT)

        for end in (
            lambda store: store.close(),
            lambda store: store.abort("on purpose"),
            lambda store: store.abort("rank 1 failed", died=True),
        ):
            on_ranks(lambda store, end=end: body(store, end))

    def test_closing_ends_ones_own_waits(self):
        over = threading.Event()

        def body(store):
            if store.rank == 1:
                assert over.wait(LIMIT)
                return

            ticket, receipt = store.post("k", "", (), lambda offers: ()), store.expect(1, 0)
            calls = [Background(lambda: ticket.wait(LIMIT)), Background(lambda: receipt.wait(LIMIT))]
            for call in calls:
                asleep(call)

            store.close()
            for call in calls:
                with pytest.raises(AbortedError):
                    call.result(LIMIT / 3)

            over.set()

        on_ranks(body)

    def test_message_of_a_rank_that_died_since_is_handed_over(self):
        died = threading.Event()

        def body(store):
            if store.rank == 0:
                store.send(torch.arange(3), 1, 0)
                store.abort("rank 0 failed", died=True)
                died.set()
                return

            assert died.wait(LIMIT)
            assert store.expect(0, 0).wait(LIMIT)[0].tolist() == [0, 1, 2]
            with pytest.raises(PeerLostError, match="rank 0"):
                store.expect(0, 0)

        on_ranks(body)
