"""Joint work over the four steps: it is done in place, for every rank, and its errors are everybody's."""

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import dtorch_core
from dtorch_core import AbortedError, CollectiveMismatchError, StoreTimeoutError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import four_steps
    from four_steps import LIMIT, add_up, on_ranks

registered = four_steps.registered


class TestJointWork:
    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_work_is_done_in_place_on_every_ranks_tensors(self, world_size):
        def body(store):
            for number in range(5):
                mine = torch.arange(4.0) + store.rank + number
                strided = torch.stack([mine, mine], 1)[:, 0]
                ticket = store.post(f"job {number}", f"note of {store.rank}", (mine, strided), add_up)
                ticket.wait(LIMIT)
                wanted = world_size * (torch.arange(4.0) + number) + sum(range(world_size))
                assert torch.equal(mine, wanted)
                assert torch.equal(strided, wanted)
                assert ticket.notes() == [f"note of {rank}" for rank in range(world_size)]
                assert ticket.done()

        on_ranks(body, world_size)

    def test_ticket_with_earlier_ends_after_what_was_begun_before(self):
        release = threading.Event()

        def held(offers):
            assert release.wait(LIMIT)
            return add_up(offers)

        def body(store):
            mine, told = torch.ones(2), threading.Event()
            store.post("held", "", (mine,), held)
            later = store.post("later", "", (), lambda offers: [])
            behind = later.with_earlier()
            later.wait(LIMIT)
            behind.add_done_callback(told.set)
            assert later.done() and not behind.done() and not told.is_set()
            with pytest.raises(StoreTimeoutError, match="later: what this rank had begun before was not done after"):
                behind.wait(0.05)

            store.barrier(timeout=LIMIT)
            release.set()
            behind.wait(LIMIT)
            assert behind.done() and mine.tolist() == [3.0, 3.0]
            assert told.wait(LIMIT)
            assert later.with_earlier().done()

        on_ranks(body, 3)

    def test_failed_ticket_is_done_whatever_was_begun_before(self):
        release = threading.Event()

        def fails(offers):
            raise CollectiveMismatchError("no two are alike")

        def body(store):
            store.post("held", "", (), lambda offers: [] if release.wait(LIMIT) else [])
            behind = store.post("fails", "", (), fails).with_earlier()
            with pytest.raises(CollectiveMismatchError, match="alike"):
                behind.wait(LIMIT)

            assert behind.done()
            store.barrier(timeout=LIMIT)
            release.set()

        on_ranks(body, 2)

    def test_posts_do_not_wait_for_each_other(self):
        """Ranks may post in any order, and wait in any other."""

        def body(store):
            numbers = list(range(12))
            if store.rank == 1:
                numbers.reverse()

            tensors = {number: torch.tensor([number + 100.0 * store.rank]) for number in numbers}
            tickets = {number: store.post(f"{number}", "", (tensors[number],), add_up) for number in numbers}
            for number in sorted(numbers, key=lambda number: (number * 7) % 12):
                tickets[number].wait(LIMIT)
                assert tensors[number].item() == 3 * number + 300

        on_ranks(body, 3)

    def test_work_of_notes_alone(self):
        def body(store):
            ticket = store.post("notes", f"{store.rank}", (), lambda offers: ())
            ticket.wait(LIMIT)
            assert list(ticket.notes()) == ["0", "1", "2"]

        on_ranks(body, 3)

    def test_error_of_the_work_reaches_every_rank(self):
        def fails(offers):
            raise CollectiveMismatchError("these do not fit")

        def breaks(offers):
            raise KeyError("of another kind")

        def body(store):
            for work, kind, text in (
                (fails, CollectiveMismatchError, "these do not fit"),
                (breaks, (KeyError, dtorch_core.DtorchError), "of another kind"),
            ):
                ticket = store.post(text, "", (torch.ones(2),), work)
                for _ in range(2):
                    with pytest.raises(kind, match=text):
                        ticket.wait(LIMIT)

                assert ticket.done()

            good = torch.ones(1)
            store.post("good", "", (good,), add_up).wait(LIMIT)
            assert good.item() == 3

        on_ranks(body, 3)

    def test_failed_call_keeps_no_tensors(self):
        """Not even until the garbage collector looks for cycles, nor while its error is kept."""

        class Memory(bytearray):
            pass

        def fails(offers):
            raise CollectiveMismatchError("these do not fit")

        def body(store):
            memory = Memory(400)
            seen = weakref.ref(memory)
            tensor = torch.frombuffer(memory, dtype=torch.float32)
            del memory
            ticket = store.post("fails", "", (tensor,), fails)
            with pytest.raises(CollectiveMismatchError) as caught:
                ticket.wait(LIMIT)

            del tensor
            if store.rank == 0:  # the threads have ended, too
                for thread in threading.enumerate():
                    if thread.name.startswith("own rank"):
                        thread.join(LIMIT)

            store.barrier()
            kept = seen() is not None
            store.barrier()
            assert "these do not fit" in str(caught.value)
            return kept

        collects = gc.isenabled()
        gc.disable()
        try:
            assert on_ranks(body, 2) == [False, False]
        finally:
            if collects:
                gc.enable()

    def test_callback_is_called_when_it_is_done_or_never_will_be(self):
        over = threading.Event()

        def body(store):
            called = threading.Event()
            if store.rank == 1:
                store.barrier()

            ticket = store.post("one", "", (torch.ones(2),), add_up)
            ticket.add_done_callback(called.set)
            if store.rank == 0:
                assert not called.is_set()
                store.barrier()

            assert called.wait(LIMIT)
            ticket.add_done_callback(called.clear)
            assert not called.is_set(), "at once, since it is done"
            store.barrier()
            if store.rank == 0:
                lonely = store.post("two", "", (torch.ones(2),), add_up)
                lonely.add_done_callback(called.set)
                store.abort("enough")
                assert called.wait(LIMIT)
                with pytest.raises(AbortedError, match="enough"):
                    lonely.wait(LIMIT)

                over.set()
            else:
                assert over.wait(LIMIT)

        on_ranks(body)

    def test_no_thread_outlives_its_work(self):
        def body(store):
            for number in range(10):
                store.post(f"{number}", "", (torch.ones(1),), add_up).wait(LIMIT)

        on_ranks(body, 3)
        deadline = time.monotonic() + 5
        for thread in threading.enumerate():
            if thread.name.startswith("own rank"):
                thread.join(max(0.0, deadline - time.monotonic()))
                assert not thread.is_alive(), thread.name
