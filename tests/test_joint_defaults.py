"""What TensorStore makes of the four steps: joint work, messages, and so a samedevice group over any store."""

import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from dtorch_memory_store.store import MemoryTensorStore

import dtorch_core
from dtorch_core import (
    AbortedError,
    BackendSpec,
    CollectiveMismatchError,
    PeerLostError,
    StoreTimeoutError,
    Support,
    TensorStore,
    UnsupportedOperationError,
    UnsupportedTensorError,
    hookimpl,
    use_backend,
)
from dtorch_core.testing import DEVICES, Background, asleep, run_kit, run_ranks

LIMIT = 15.0


class FourStepStore(MemoryTensorStore):
    """The memory store's four steps, and the base class's defaults for everything made of them."""

    post = TensorStore.post
    send = TensorStore.send
    expect = TensorStore.expect


class Plugin:
    @hookimpl
    def dtorch_register_tensor_stores(self):
        def probe(topology):
            return Support.yes(1, "threads") if topology.same_process else Support.no("several processes")

        words = frozenset({"cpu", "cuda", "zero_copy"})
        return [BackendSpec("four steps", f"{__name__}:FourStepStore", probe, capabilities=words)]

    @hookimpl
    def dtorch_register_thread_groups(self):
        def probe(topology):
            return Support.yes(1, "a samedevice group that can't receive from any source")

        words = "cpu cuda uneven bitwise_ops p2p tags self_send split mismatch rank_order async"
        factory = "dtorch_samedevice_group.group:open_process_group"
        return [BackendSpec("over four steps", factory, probe, capabilities=frozenset(words.split()))]


@pytest.fixture(scope="module", autouse=True)
def registered():
    dtorch_core.register(Plugin(), name="four steps")
    yield
    dtorch_core.unregister("four steps")


def on_ranks(body, world_size=2, timeout=LIMIT):
    def rank(ctx):
        with ctx.open_store("own", backend="four steps", timeout=timeout) as store:
            return body(store)

    return run_ranks(rank, world_size, 2 * LIMIT)


def held_back(store, part):
    """Keep what this rank says under keys with ``part`` from the others, as a slow wire does; what lets it arrive."""
    says, kept = store.src_set, []

    def src_set(key, *args, **options):
        if part in key:
            kept.append(partial(says, key, *args, **options))
        else:
            says(key, *args, **options)

    def arrive():
        store.src_set = says
        for say in kept:
            say()

    store.src_set = src_set
    return arrive


def add_up(offers):
    """Every tensor becomes the sum of all ranks'; two tasks a tensor."""
    tasks = []
    for tensors in zip(*(offer.tensors for offer in offers), strict=True):
        total = sum(tensor.clone() for tensor in tensors)
        tasks += [lambda tensor=tensor, total=total: tensor.copy_(total) for tensor in tensors]

    return tasks


def held_until(begun, release):
    """As add_up, which says that it has begun, and waits until it is let go on."""

    def held(offers):
        begun.set()
        assert release.wait(LIMIT)
        return add_up(offers)

    return held


class TestGroupOverFourSteps:
    """What the kit asks of a group, over a store with the defaults: the tests that a store can make fail."""

    TESTS = f"""
        test_collective_of_odd_and_empty_shapes[{DEVICES[0]}-1] test_collective_of_odd_and_empty_shapes[{DEVICES[0]}-3]
        test_collective_of_large_tensors[{DEVICES[0]}-2] test_collective_of_any_layout test_result_shares_no_memory
        test_result_is_of_its_own_ranks_inference_mode test_out_may_be_the_input test_out_of_all_to_all_may_be_the_input
        test_many_in_flight_are_waited_for_in_any_order test_large_and_small_in_flight
        test_work_that_is_dropped_ends_all_the_same test_work_may_be_waited_for_by_several_threads
        test_future_can_be_followed test_work_of_a_mismatch_raises test_work_that_is_late_raises_at_its_deadline
        test_mismatch_among_many_in_flight test_mismatch_of_every_rank_with_every_other
        test_message_is_a_copy test_messages_arrive_in_order test_receive_can_be_retried_after_a_timeout
        test_receive_that_waits_in_the_background test_receive_from_a_rank_that_left
        test_receiving_from_anybody_is_refused test_timeout_is_each_ranks_own
        test_timeout_names_who_has_not_come_and_who_gave_up[all_reduce]
        test_timeout_names_who_has_not_come_and_who_gave_up[all_gather]
        test_abort_wakes_every_rank_now_and_later[all_reduce] test_abort_wakes_every_rank_now_and_later[all_gather]
        test_close_wakes_ones_own_wait test_close_is_a_goodbye test_failure_ends_futures_and_callbacks
        test_rank_that_fails_ends_the_run_at_once[all_to_all]
    """.split()

    def test_group_conforms(self):
        with use_backend(store="four steps"):
            outcomes = run_kit("group", "over four steps", select=self.TESTS)

        failed = [f"{outcome.test}: {outcome.report}" for outcome in outcomes if outcome.state == "failed"]
        assert not failed, "\n".join(failed)
        ran = {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state == "passed"}
        assert ran == {test.partition("[")[0] for test in self.TESTS}


class TestStoreOverFourSteps:
    def test_store_conforms(self):
        """What the kit asks of joint work and messages, whoever makes them."""
        outcomes = run_kit("store", "four steps", expression="post or message")
        failed = [f"{outcome.test}: {outcome.report}" for outcome in outcomes if outcome.state == "failed"]
        assert not failed, "\n".join(failed)
        assert len([outcome for outcome in outcomes if outcome.state == "passed"]) >= 20


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

    def test_rank_that_leaves_before_the_work_ends_the_others_calls(self):
        """Also where other ranks are left, of which one might have satisfied what rank 0 waits for."""
        came, posted, left = (threading.Event() for _ in range(3))

        def body(store):
            if store.rank == 1:
                says = store.src_set

                def src_set(key, *args, **options):
                    says(key, *args, **options)
                    if "/note/" in key:
                        came.set()

                store.src_set = src_set
                ticket = store.post("left", "", (torch.ones(2),), add_up)
                assert came.wait(LIMIT)
                assert posted.wait(LIMIT)
                store.close()
                left.set()
                with pytest.raises(AbortedError):
                    ticket.wait(LIMIT)

                return

            if store.rank == 0:
                ticket = store.post("left", "", (torch.ones(2),), add_up)
                posted.set()
            else:
                assert left.wait(LIMIT)
                ticket = store.post("left", "", (torch.ones(2),), add_up)

            with pytest.raises(PeerLostError, match="rank 1"):
                ticket.wait(LIMIT / 2)

        on_ranks(body, 3)

    def test_tensor_that_the_store_refuses_ends_the_call_on_every_rank(self):
        def body(store):
            sets = store.src_set

            def refuses(key, tensor, *args, **options):
                if options.get("writable"):
                    raise UnsupportedTensorError("not today")

                sets(key, tensor, *args, **options)

            store.src_set = refuses if store.rank == 1 else sets
            with pytest.raises(UnsupportedTensorError, match="not today"):
                store.post("refused", "", (torch.ones(2),), add_up).wait(LIMIT / 2)

            store.src_set = sets
            good = torch.ones(1)
            store.post("good", "", (good,), add_up).wait(LIMIT / 2)
            assert good.item() == 3

        on_ranks(body, 3)

    @pytest.mark.parametrize("how", ["abort", "death", "close"])
    def test_tensors_are_their_ranks_own_once_its_call_has_raised(self, how):
        """Whatever ends it while the work is done: where that is in this process, the call raises behind it."""
        begun, release = threading.Event(), threading.Event()
        held = held_until(begun, release)

        def body(store):
            tensor = torch.ones(2)
            ticket = store.post("cut short", "", (tensor,), held)
            assert begun.wait(LIMIT)
            if store.rank == 1:
                call = Background(lambda: ticket.wait(LIMIT))
                asleep(call)
                store.barrier()
                if how == "close":
                    store.close()

                call.thread.join(0.2)
                assert call.thread.is_alive(), "its tensor is being written"
                release.set()
                with pytest.raises(AbortedError if how != "death" else PeerLostError):
                    call.result(LIMIT)

                assert tensor.tolist() == [3.0, 3.0]
                return

            store.barrier()
            if store.rank == 2 and how != "close":
                store.abort("on purpose", died=how == "death")

            assert release.wait(LIMIT)

        on_ranks(body, 3)

    def test_rank_that_dies_ends_every_wait(self):
        waiting = threading.Event()

        def body(store):
            if store.rank == 1:
                assert waiting.wait(LIMIT)
                store.abort("rank 1 failed: on purpose", died=True)
                return

            call = Background(lambda: store.post("x", "", (torch.ones(1),), add_up).wait(60))
            asleep(call)
            waiting.set()
            with pytest.raises(PeerLostError, match="rank 1"):
                call.result(LIMIT)

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


class TestMessages:
    def test_messages_are_in_order_for_each_source_and_tag(self):
        def body(store):
            others = [rank for rank in range(3) if rank != store.rank]
            for number in range(30):
                for dst in others:
                    store.send(torch.tensor([100 * store.rank + number]), dst, number % 2)

            for src in others:
                receipts = [store.expect(src, number % 2) for number in range(30)]
                for number, receipt in reversed(list(enumerate(receipts))):
                    message, source = receipt.wait(LIMIT)
                    assert (int(message), source) == (100 * src + number, src)
                    assert receipt.wait(LIMIT)[0] is message
                    assert receipt.done()

        on_ranks(body, 3)

    def test_message_is_a_copy(self):
        def body(store):
            if store.rank == 0:
                x = torch.arange(3.0)
                store.send(x, 1, 0)
                x.fill_(-1)
                store.barrier()
            else:
                store.barrier()
                message, _ = store.expect(0, 0).wait(LIMIT)
                assert message.tolist() == [0, 1, 2]
                message.fill_(-2)

        on_ranks(body)

    def test_receipt_stays_expected_after_a_timeout_and_can_be_cancelled(self):
        def body(store):
            if store.rank == 0:
                store.barrier()
                for value in range(3):
                    store.send(torch.tensor(value), 1, 0)

                return

            first, second, third = (store.expect(0, 0) for _ in range(3))
            with pytest.raises(StoreTimeoutError, match="rank 0 had not sent it"):
                first.wait(0.05)

            assert not first.done()
            assert second.cancel()
            store.barrier()
            assert int(first.wait(LIMIT)[0]) == 0
            assert int(third.wait(LIMIT)[0]) == 2
            assert int(store.expect(0, 0).wait(LIMIT)[0]) == 1, "a cancelled receipt's message goes to the next one"
            assert not first.cancel()

        on_ranks(body)

    def test_looking_does_not_wait_for_a_thread_that_waits(self):
        def body(store):
            if store.rank == 0:
                store.barrier()
                store.send(torch.tensor(7), 1, 0)
                return

            receipt = store.expect(0, 0)
            call = Background(lambda: receipt.wait(LIMIT))
            asleep(call)
            begun = time.monotonic()
            assert not receipt.done()
            with pytest.raises(StoreTimeoutError):
                receipt.wait(0.05)

            assert time.monotonic() - begun < LIMIT / 3
            called = threading.Event()
            receipt.add_done_callback(called.set)
            store.barrier()
            assert int(call.result(LIMIT)[0]) == 7
            assert called.wait(LIMIT)

        on_ranks(body)

    def test_any_source_is_refused(self):
        def body(store):
            with pytest.raises(UnsupportedOperationError, match="any source"):
                store.expect(None, 0)

        on_ranks(body, 1)

    def test_keys_of_messages_that_were_taken_are_freed(self):
        def body(store):
            for number in range(200):
                store.send(torch.tensor([number]), store.rank, 0)
                assert int(store.expect(store.rank, 0).wait(LIMIT)[0]) == number

            return len(store._session.keys._keys)

        assert on_ranks(body, 1)[0] < 5

    def test_many_unread_messages_cost_little(self):
        def body(store):
            begun = time.monotonic()
            for number in range(2000):
                store.send(torch.tensor([number]), 0, 0)

            took = time.monotonic() - begun
            for number in range(2000):
                assert int(store.expect(0, 0).wait(LIMIT)[0]) == number

            return took

        assert on_ranks(body, 1)[0] < 3

    def test_message_to_a_rank_that_left_does_not_fail_the_next_one(self):
        left = threading.Event()

        def body(store):
            if store.rank == 2:
                store.close()
                left.set()
                return

            assert left.wait(LIMIT)
            for number in range(5):
                if store.rank == 0:
                    store.send(torch.tensor(0), 2, 0)
                    store.send(torch.tensor(number), 1, 0)
                else:
                    assert int(store.expect(0, 0).wait(LIMIT)[0]) == number

        on_ranks(body, 3)
