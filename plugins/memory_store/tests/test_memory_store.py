"""The memory store: the contract of every store, and what is this one's own."""

import array
import gc
import os
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from dtorch_memory_store.store import MemoryTensorStore

from dtorch_core import AbortedError, KeyInUseError, PeerLostError, ProtocolError, StoreTimeoutError, open_store
from dtorch_core.testing import Background, TensorStoreTests, asleep, run_ranks

LIMIT = 15.0


class TestMemoryStoreConforms(TensorStoreTests):
    backend = "memory"


def on_ranks(body, world_size):
    def rank(ctx):
        with ctx.open_store("own", backend="memory", timeout=LIMIT) as store:
            return body(store)

    return run_ranks(rank, world_size, 2 * LIMIT)


class TestSharing:
    def test_any_cpu_tensor_is_shared_not_copied(self):
        def body(store):
            tensor = torch.arange(24.0).reshape(4, 6)[1:, ::2]
            if store.rank == 0:
                store.src_set("k", tensor, 2)
                store.barrier()
                store.src_wait_until_get_finished("k")
                return tensor.data_ptr(), tensor.stride()

            got = store.dest_get("k")
            store.barrier()
            assert torch.equal(got, tensor)
            store.dest_finish_get("k")
            return got.data_ptr(), got.stride()

        producer, *consumers = on_ranks(body, 3)
        assert consumers == [producer] * 2

    def test_plain_tensor_may_be_published_writable(self):
        def body(store):
            tensor = torch.arange(6.0)
            if store.rank == 0:
                store.src_set("k", tensor[2:4], 1, writable=True)
                store.src_wait_until_get_finished("k")
                assert tensor.tolist() == [0, 1, 20, 30, 4, 5]
            else:
                store.dest_get("k").mul_(10)
                store.dest_finish_get("k")

        on_ranks(body, 2)

    def test_writable_copy_for_another_device_is_refused(self):
        def body(store):
            with pytest.raises(ProtocolError, match="writable"):
                store.src_set("k", torch.arange(3), 1, writable=True, dest_device="cuda:0")

            store.src_set("k", torch.arange(3), 1, writable=True, dest_device="cpu")

        on_ranks(body, 1)

    def test_default_device_and_dtype_of_the_caller_do_not_matter(self):
        def body(store):
            tensor = torch.arange(10.0)
            with torch.device("meta"):
                store.src_set("k", tensor[3:5], 1)
                got = store.dest_get("k")

            assert got.tolist() == [3, 4]
            store.dest_finish_get("k")
            with torch.device("meta"):
                store.src_wait_until_get_finished("k")

        on_ranks(body, 1)

    def test_view_keeps_its_storage_alive(self):
        def body(store):
            store.src_set("k", torch.arange(1000.0)[500:503], 1)
            gc.collect()
            trash = [torch.full((1000,), -1.0) for _ in range(10)]
            assert store.dest_get("k").tolist() == [500, 501, 502]
            store.dest_finish_get("k")
            del trash

        on_ranks(body, 1)


class TestArguments:
    @pytest.mark.parametrize("device", ["foo", "meta", "cuda:99"])
    def test_device_that_is_not_there_is_refused_by_name(self, device):
        def body(store):
            with pytest.raises(ValueError, match=rf"src_set\('k'\): device '{device}'"):
                store.src_set("k", torch.arange(3), 1, dest_device=device)

            with pytest.raises(ValueError, match=rf"store 'own', empty: device '{device}'"):
                store.empty((2,), dtype=torch.float32, device=device)

            store.src_set("k", torch.arange(3), 1)
            with pytest.raises(ValueError, match=rf"dest_get_to_device\('k'\): device '{device}'"):
                store.dest_get_to_device("k", device)

            assert store.dest_get_to_device("k", "cpu").tolist() == [0, 1, 2]

        on_ranks(body, 1)

    @pytest.mark.parametrize("key", [None, 5, b"k", ["k"]])
    def test_key_must_be_a_string(self, key):
        def body(store):
            for call in (lambda: store.src_set(key, torch.arange(3), 1), lambda: store.dest_get(key)):
                with pytest.raises(TypeError, match="a key is a string, not"):
                    call()

        on_ranks(body, 1)

    @pytest.mark.parametrize(
        ("timeout", "error"),
        [
            ("x", TypeError),
            (True, TypeError),
            (-3, ValueError),
            (-0.5, ValueError),
            (float("nan"), ValueError),
            (float("inf"), ValueError),
        ],
    )
    def test_timeout_must_be_a_number_of_seconds(self, timeout, error):
        def body(store):
            store.src_set("k", torch.arange(3), 1)
            for call in (
                lambda: store.barrier(timeout=timeout),
                lambda: store.reset(timeout=timeout),
                lambda: store.dest_get("other", timeout=timeout),
                lambda: store.src_wait_until_get_finished("k", timeout=timeout),
            ):
                with pytest.raises(error, match="store 'own', rank 0: timeout must be .* not "):
                    call()

        on_ranks(body, 1)

    @pytest.mark.parametrize("timeout", [0, 0.0])
    def test_timeout_of_zero_is_a_look(self, timeout):
        def body(store):
            with pytest.raises(StoreTimeoutError):
                store.dest_get("k", timeout=timeout)

            store.src_set("k", torch.arange(3), 1)
            assert store.dest_get("k", timeout=timeout).tolist() == [0, 1, 2]

        on_ranks(body, 1)


class TestWakeUps:
    @pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux: the scheduler's count of wake-ups")
    def test_exchange_wakes_only_the_threads_of_its_key(self):
        """A hundred threads wait for other keys and stay asleep through two hundred exchanges."""

        def switches(thread):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

        def body(store):
            others = []
            if store.rank == 1:
                others = [Background(lambda n=n: store.dest_get(f"other {n}")) for n in range(100)]
                for other in others:
                    asleep(other)

            store.barrier()
            before = [switches(other.thread) for other in others]
            for _ in range(200):
                if store.rank == 0:
                    store.src_set("k", torch.arange(3), 1)
                    store.src_wait_until_get_finished("k")
                else:
                    store.dest_get("k")
                    store.dest_finish_get("k")

            after = [switches(other.thread) for other in others]
            assert sum(after) - sum(before) < 20
            store.barrier()
            for n in range(100) if store.rank == 0 else ():
                store.src_set(f"other {n}", torch.tensor(n), 1)

            assert [int(other.result()) for other in others] == list(range(len(others)))

        on_ranks(body, 2)


class TestReset:
    def test_barrier_that_a_reset_ended_does_not_count(self):
        """Its thread may not have woken when the ranks come to the next barrier."""

        def body(store):
            for _ in range(100):
                pending = Background(store.barrier) if store.rank == 1 else None
                if pending is not None:
                    asleep(pending, 0.02)

                try:
                    store.reset()
                except AbortedError:
                    raise AssertionError("reset itself was aborted") from None

                passed.append(store.rank)
                store.barrier()
                assert len(passed) % 3 == 0
                store.barrier()
                if pending is not None:
                    with pytest.raises(AbortedError):
                        pending.result()

        passed = []
        on_ranks(body, 3)

    def test_second_finish_after_a_reset_is_a_protocol_error(self):
        def body(store):
            store.src_set("k", torch.arange(3), 1)
            store.dest_get("k")
            store.reset()
            store.src_set("k", torch.arange(4), 1)
            store.dest_get("k")
            store.dest_finish_get("k")
            with pytest.raises(ProtocolError):
                store.dest_finish_get("k")

        on_ranks(body, 1)

    def test_finish_of_a_borrow_that_a_reset_ended_says_so(self):
        def body(store):
            store.src_set("k", torch.arange(3), 1)
            store.dest_get("k")
            store.reset()
            with pytest.raises(AbortedError, match="reset"):
                store.dest_finish_get("k")

            with pytest.raises(ProtocolError):
                store.dest_finish_get("k")

        on_ranks(body, 1)

    def test_wait_that_only_a_resetting_rank_could_satisfy_ends(self):
        def body(store):
            if store.rank == 0:
                with pytest.raises(AbortedError, match=r"reset\(\)"):
                    store.dest_get("k")

            store.reset()

        on_ranks(body, 2)


class TestLeaving:
    def test_dropped_handle_says_goodbye(self):
        def rank(ctx):
            store = ctx.open_store("own", backend="memory", timeout=LIMIT)
            if ctx.rank == 1:
                store.barrier()
                del store
                gone.wait(LIMIT)
                return

            store.barrier()
            with pytest.raises(PeerLostError, match="rank 1"):
                store.dest_get("k")

            gone.set()

        gone = threading.Event()
        run_ranks(rank, 2, 2 * LIMIT)

    def test_handle_collected_while_the_session_is_busy_does_not_deadlock(self):
        """The garbage collector runs in any thread, also in one that holds the session's mutex."""

        def rank(ctx):
            store = ctx.open_store("own", backend="memory", timeout=LIMIT)
            session = store._session
            store.barrier()
            if ctx.rank == 1:
                cycle = [store]
                cycle.append(cycle)
                del store, cycle
                collected.set()
                gone.wait(LIMIT)
                return

            collected.wait(LIMIT)
            with session.presence.mutex:
                gc.collect()

            with pytest.raises(PeerLostError, match="rank 1"):
                store.dest_get("k")

            gone.set()

        collected, gone = threading.Event(), threading.Event()
        gc.disable()
        try:
            run_ranks(rank, 2, 2 * LIMIT)
        finally:
            gc.enable()

    def test_memory_is_not_freed_under_the_mutex(self):
        """What runs when a tensor dies may use the store."""

        def body(store):
            def on_death(_):
                store.src_set("last words", torch.arange(2), 1)

            values = array.array("B", range(10))
            watch = weakref.ref(values, on_death)
            store.src_set("k", torch.frombuffer(values, dtype=torch.uint8), 1)
            del values
            store.dest_get("k")
            store.dest_finish_get("k")
            assert watch() is None
            assert store.dest_get("last words", timeout=LIMIT).tolist() == [0, 1]

        on_ranks(body, 1)

    def test_sessions_do_not_pile_up(self):
        from dtorch_memory_store import store as module

        before = len(module._sessions)
        for _ in range(3):
            on_ranks(lambda store: store.barrier(), 3)

        assert len(module._sessions) == before

    def test_goodbye_names_those_who_left(self):
        def body(store):
            if store.rank == 2:
                return

            if store.rank == 0:
                store.src_set("k", torch.arange(3), 2)
                with pytest.raises(PeerLostError, match="rank 2") as caught:
                    store.src_wait_until_get_finished("k")

                assert "rank 1" not in str(caught.value)
                over.set()
            else:
                over.wait(LIMIT)

        over = threading.Event()
        on_ranks(body, 3)

    def test_death_of_a_rank_names_it_and_its_error(self):
        def rank(ctx):
            store = ctx.open_store("own", backend="memory", timeout=LIMIT)
            if ctx.rank == 1:
                raise KeyError("lost on purpose")

            try:
                store.dest_get("k")
            except PeerLostError as error:
                told.append(str(error))
                raise

        told = []
        with pytest.raises(Exception, match="lost on purpose"):
            run_ranks(rank, 2, LIMIT)

        assert len(told) == 1
        for part in ("rank 0", "'k'", "rank 1", f"pid {os.getpid()}", "KeyError", "lost on purpose", "anew"):
            assert part in told[0]

    def test_key_of_a_producer_that_left_is_free_once_its_consumers_have_finished(self):
        left = threading.Event()

        def rank(ctx):
            store = ctx.open_store("left", timeout=LIMIT)
            if ctx.rank == 0:
                store.src_set("before", torch.arange(3), 1)
                store.src_set("after", torch.arange(3), 1)
                store.barrier()
                store.close()
                left.set()
                return None

            with store.borrow("before"):
                pass

            store.barrier()
            assert left.wait(LIMIT)
            with store.borrow("after"):
                pass

            for key in ("before", "after"):
                store.src_set(key, torch.arange(4), 1)

            with store.borrow("after") as value:
                return value.tolist()

        assert run_ranks(rank, 2, 2 * LIMIT) == [None, [0, 1, 2, 3]]


class TestJointWork:
    def test_callback_that_raises_keeps_nobody_asleep(self, caplog):
        """Rank 1 leaves: rank 0's callback is called on the way, and its thread behind it is woken."""

        def fail():
            raise KeyError("a callback's own error")

        def body(store):
            if store.rank == 1:
                asleep(waiting.result())
                return

            store.post("work", "note", [torch.arange(3)], lambda offers: []).add_done_callback(fail)
            receiver = Background(lambda: store.expect(1, 0).wait(LIMIT))
            started.append(receiver)
            ready.set()
            with pytest.raises(PeerLostError, match="rank 1"):
                receiver.result()

        started, ready = [], threading.Event()
        waiting = Background(lambda: ready.wait(LIMIT) and started[0])
        on_ranks(body, 2)
        assert "a callback's own error" in caplog.text

    def test_finished_work_holds_no_tensor(self):
        """Whoever keeps a ticket keeps no tensor of any rank."""
        alive = []

        def body(store):
            values = array.array("q", range(3))
            alive.append(weakref.ref(values))
            ticket = store.post("work", "note", [torch.frombuffer(values, dtype=torch.int64)], lambda offers: [])
            del values
            ticket.wait(LIMIT)
            store.barrier()
            assert [watch() for watch in alive] == [None, None]
            store.barrier()
            return ticket

        on_ranks(body, 2)

    def test_memory_is_not_freed_under_the_mutex(self):
        """What runs when a tensor dies may use the store."""

        def body(store):
            values = array.array("q", range(3))
            watch = weakref.ref(values, lambda _: store.src_set("last words", torch.arange(2), 1))
            ticket = store.post("work", "note", [torch.frombuffer(values, dtype=torch.int64)], lambda offers: [])
            del values
            ticket.wait(LIMIT)
            assert watch() is None
            assert store.dest_get("last words", timeout=LIMIT).tolist() == [0, 1]

        on_ranks(body, 1)


class TestMessages:
    def test_key_in_use_says_who_holds_it_and_what_frees_it(self):
        def body(store):
            if store.rank == 0:
                store.src_set("weights", torch.arange(3), 1)

            store.barrier()
            if store.rank == 1:
                with pytest.raises(KeyInUseError) as caught:
                    store.src_set("weights", torch.arange(3), 1)

                for part in ("'own'", "'weights'", "rank 1", "rank 0", "src_wait_until_get_finished"):
                    assert part in str(caught.value)

        on_ranks(body, 2)

    def test_late_get_says_that_the_shares_are_taken(self):
        def body(store):
            if store.rank == 0:
                store.src_set("k", torch.arange(3), 1)
                store.dest_get("k")

            store.barrier()
            if store.rank == 1:
                with pytest.raises(StoreTimeoutError, match="1 consumer only, taken by rank 0"):
                    store.dest_get("k", timeout=0.05)

            store.barrier()

        on_ranks(body, 2)


class TestOpening:
    def test_ranks_in_threads_of_ones_own_need_no_spawn(self):
        def rank(number):
            with open_store("plain threads", rank=number, world_size=2, timeout=LIMIT) as store:
                assert isinstance(store, MemoryTensorStore)
                if number == 0:
                    store.src_set("k", torch.arange(5), 1)
                    store.src_wait_until_get_finished("k")
                else:
                    with store.borrow("k") as got:
                        assert got.tolist() == [0, 1, 2, 3, 4]

        ranks = [Background(lambda number=number: rank(number)) for number in range(2)]
        for running in ranks:
            running.result()

    def test_store_of_one_rank(self):
        with open_store("alone", rank=0, world_size=1) as store:
            assert store.backend == "memory"
            store.src_set("k", torch.arange(5), 1)
            assert store.dest_get_to_device("k", "cpu").tolist() == [0, 1, 2, 3, 4]

    def test_reference_to_a_taken_tensor_dies_with_the_last_finish(self):
        """Also the exception of a failed second set holds nothing."""
        with open_store("alone", rank=0, world_size=1) as store:
            tensor = torch.arange(5)
            count = sys.getrefcount(tensor)
            store.src_set("k", tensor, 1)
            with pytest.raises(KeyInUseError):
                store.src_set("k", tensor, 1)

            store.dest_get_to_device("k", "cpu")
            store.src_wait_until_get_finished("k")
            assert sys.getrefcount(tensor) == count
