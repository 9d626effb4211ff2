"""spawn: ranks as threads, their results, and how a run ends when one of them fails, hangs or is interrupted."""

import os
import signal
import threading
import time

import pytest
import torch

import dtorch_core
from dtorch_core import (
    AbortedError,
    PeerLostError,
    ProtocolError,
    RankFailedError,
    StoreTimeoutError,
    UnsupportedOperationError,
    spawn,
)
from dtorch_core.testing import Background, run_ranks

LIMIT = 15.0
PROMPT = 3.0
"""Seconds in which a failing run has to be over: a second of grace, and slack for a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def driver():
    """What CUDA opens for itself it opens now."""
    for number in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{number}")


@pytest.fixture(autouse=True)
def nothing_outlives_a_run():
    before = set(threading.enumerate())
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield
    assert set(threading.enumerate()) <= before
    assert not files or len(os.listdir("/proc/self/fd")) <= files


class TestResults:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
    def test_results_come_by_rank(self, world_size):
        assert spawn(lambda ctx: ctx.rank * 10, world_size) == [rank * 10 for rank in range(world_size)]

    def test_context_says_who_the_rank_is(self):
        seen = spawn(lambda ctx: (ctx.rank, ctx.world_size, ctx.device, threading.current_thread().name), 2)
        assert seen == [(0, 2, "cpu", "rank 0"), (1, 2, "cpu", "rank 1")]

    def test_args_go_to_every_rank(self):
        assert spawn(lambda ctx, a, b: (a, b, ctx.rank), 2, args=("a", 2)) == [("a", 2, 0), ("a", 2, 1)]

    def test_threads_have_ended_when_spawn_returns(self):
        before = set(threading.enumerate())
        for _ in range(30):
            spawn(lambda ctx: None, 4)
            assert set(threading.enumerate()) <= before

    def test_ranks_meet_in_a_store(self):
        def rank(ctx):
            store = ctx.open_store("k", timeout=LIMIT)
            store.src_set(f"{ctx.rank}", torch.arange(3) + 10 * ctx.rank, 1)
            got = store.dest_get_to_device(f"{(ctx.rank + 1) % 3}", "cpu")
            store.src_wait_until_get_finished(f"{ctx.rank}")
            return got.tolist()

        assert spawn(rank, 3) == [[10, 11, 12], [20, 21, 22], [0, 1, 2]]

    def test_two_runs_at_once_may_use_the_same_names(self):
        def rank(ctx, run):
            store = ctx.open_store("same", timeout=LIMIT)
            for turn in range(20):
                if ctx.rank == 0:
                    with store.publish("k", torch.tensor([run, turn]), 1):
                        pass
                else:
                    assert store.dest_get_to_device("k", "cpu").tolist() == [run, turn]

            return run

        runs = [Background(lambda run=run: spawn(rank, 2, args=(run,))) for run in range(3)]
        assert [run.result() for run in runs] == [[0, 0], [1, 1], [2, 2]]

    def test_spawn_within_a_rank(self):
        def inner(ctx, outer):
            with ctx.open_store("same", timeout=LIMIT) as store:
                store.barrier()
                return outer, ctx.rank

        def rank(ctx):
            with ctx.open_store("same", timeout=LIMIT) as store:
                results = spawn(inner, 2, args=(ctx.rank,))
                store.barrier()
                return results

        assert spawn(rank, 2) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


class TestHandles:
    def test_what_a_rank_left_open_is_closed_last_opened_first(self):
        closed = []

        class Handle:
            def __init__(self, number):
                self.number = number

            def abort(self, reason, *, died=False):
                raise AssertionError(reason)

            def close(self):
                closed.append(self.number)

        handles = [Handle(number) for number in range(50)]

        def rank(ctx):
            for handle in handles:
                ctx._scope.add(handle)

        run_ranks(rank, 1)
        assert closed == list(range(49, -1, -1))


class TestFailure:
    def test_first_failure_ends_the_run_with_its_rank_and_traceback(self):
        def failing_function(ctx):
            store = ctx.open_store("k", timeout=LIMIT)
            if ctx.rank == 2:
                raise KeyError("lost on purpose")

            store.dest_get("never set")

        begun = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            spawn(failing_function, 4)

        assert time.monotonic() - begun < PROMPT
        assert caught.value.rank == 2
        assert isinstance(caught.value.__cause__, KeyError)
        for part in ("rank 2 of 4", "KeyError", "lost on purpose", "Traceback of rank 2", "in failing_function"):
            assert part in str(caught.value)

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
    def test_exit_of_a_rank_is_a_failure_of_it(self, error):
        def rank(ctx):
            if ctx.rank == 0:
                raise error

            ctx.open_store("k", timeout=LIMIT)

        with pytest.raises(RankFailedError, match=f"rank 0 of 2 failed with {type(error).__name__}") as caught:
            run_ranks(rank, 2, LIMIT)

        assert caught.value.__cause__ is error

    def test_failure_wakes_ranks_that_are_still_opening(self):
        def rank(ctx):
            if ctx.rank == 1:
                raise ValueError("before it opened")

            ctx.open_store("k", timeout=LIMIT)

        begun = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 1 of 3 failed with ValueError"):
            run_ranks(rank, 3, LIMIT)

        assert time.monotonic() - begun < PROMPT

    def test_rank_that_was_only_told_is_not_the_one_named(self):
        """It leaves the store by its error; the peers hear of it, and raise, before that error has come out."""

        def rank(ctx):
            try:
                with ctx.open_store("k", timeout=LIMIT) as store:
                    store.barrier()
                    if ctx.rank == 1:
                        raise ZeroDivisionError("the cause")

                    store.dest_get("never set")
            finally:
                if ctx.rank == 1:
                    others_raised.wait(LIMIT)
                else:
                    others_raised.release_one()

        class AllButOne:
            def __init__(self):
                self._left, self._event, self._lock = 2, threading.Event(), threading.Lock()

            def release_one(self):
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        self._event.set()

            def wait(self, timeout):
                assert self._event.wait(timeout)

        others_raised = AllButOne()
        with pytest.raises(RankFailedError, match="rank 1 of 3 failed with ZeroDivisionError: the cause"):
            run_ranks(rank, 3, LIMIT)

    def test_survivors_see_the_loss_even_in_a_later_wait(self):
        def rank(ctx):
            store = ctx.open_store("k", timeout=LIMIT)
            store.barrier()
            if ctx.rank == 1:
                raise ValueError("first")

            for _ in range(2):
                with pytest.raises(PeerLostError, match="rank 1"):
                    store.barrier()

            seen.append(ctx.rank)

        seen = []
        with pytest.raises(RankFailedError, match="first"):
            run_ranks(rank, 3, LIMIT)

        assert sorted(seen) == [0, 2]

    def test_busy_rank_is_left_behind_and_named(self):
        def rank(ctx):
            if ctx.rank == 1:
                raise ValueError("first")

            threads.append(threading.current_thread())
            release.wait(LIMIT)
            with pytest.raises(AbortedError):  # whatever it opens later ends at once
                ctx.open_store("k", timeout=LIMIT)

            late.set()

        threads, release, late = [], threading.Event(), threading.Event()
        with pytest.raises(RankFailedError, match=r"rank 0 did not return within .* daemon thread \('rank 0'\)"):
            run_ranks(rank, 2, LIMIT)

        assert threads[0].daemon
        assert threads[0].is_alive()
        release.set()
        assert late.wait(LIMIT)
        threads[0].join(LIMIT)

    def test_busy_ranks_are_left_behind_as_threads(self):
        def rank(ctx):
            if ctx.rank == 1:
                raise ValueError("first")

            threads.append(threading.current_thread())
            release.wait(LIMIT)

        threads, release = [], threading.Event()
        try:
            with pytest.raises(
                RankFailedError, match=r"rank 0, rank 2 did not .* and were left behind as daemon threads \('rank 0', "
            ):
                run_ranks(rank, 3, LIMIT)
        finally:
            release.set()
            for thread in threads:
                thread.join(LIMIT)

    def test_failure_in_a_nested_spawn_names_both_ranks(self):
        def inner(ctx):
            if ctx.rank == 1:
                raise ValueError("deep inside")

        def rank(ctx):
            if ctx.rank == 0:
                spawn(inner, 2)

        with pytest.raises(RankFailedError, match="rank 0 of 1 failed with RankFailedError: rank 1 of 2") as caught:
            run_ranks(rank, 1, LIMIT)

        assert isinstance(caught.value.__cause__.__cause__, ValueError)

    def test_failure_wakes_a_rank_that_is_in_a_nested_spawn(self):
        def inner(ctx):
            inside.set()
            ctx.open_store("k", timeout=LIMIT).dest_get("never set")

        def rank(ctx):
            if ctx.rank == 0:
                spawn(inner, 2)

            assert inside.wait(LIMIT)
            raise ValueError("outer")

        inside = threading.Event()
        begun = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 1 of 2 failed with ValueError: outer") as caught:
            run_ranks(rank, 2, LIMIT)

        assert time.monotonic() - begun < PROMPT
        assert "daemon" not in str(caught.value)

    def test_error_keeps_no_store_open(self):
        """The traceback keeps the rank's variables; what they hold of ours is closed."""

        def rank(ctx):
            store = ctx.open_store("k", timeout=LIMIT)
            stores.append(store)
            if ctx.rank == 1:
                raise ValueError("first")

            store.barrier()

        stores = []
        with pytest.raises(RankFailedError, match="first"):
            run_ranks(rank, 2, LIMIT)

        for store in stores:
            with pytest.raises(AbortedError, match="closed"):
                store.dest_get("k")

    def test_abort_that_raises_stops_no_other(self, caplog):
        class Odd:
            def abort(self, reason, *, died=False):
                raise ProtocolError("an odd backend")

        def rank(ctx):
            ctx._scope.add(odd)
            store = ctx.open_store("k", timeout=LIMIT)
            store.barrier()
            if ctx.rank == 1:
                raise ValueError("first")

            store.dest_get("never set")

        odd = Odd()
        with pytest.raises(RankFailedError, match="rank 1 of 2 failed with ValueError: first"):
            run_ranks(rank, 2, LIMIT)

        assert "an odd backend" in caplog.text


class TestTimeout:
    def test_timeout_ends_the_run_and_names_who_is_late(self):
        def rank(ctx):
            if ctx.rank != 1:
                ctx.open_store("k", timeout=LIMIT)

        begun = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="rank 0, rank 2 of 3 had not returned after 0.2 s"):
            spawn(rank, 3, timeout=0.2)

        assert 0.15 < time.monotonic() - begun < PROMPT

    def test_timeout_of_a_store_names_who_is_missing(self):
        def rank(ctx):
            if ctx.rank == 1:
                assert over.wait(LIMIT)
                return

            try:
                ctx.open_store("k", timeout=0.2)
            finally:
                over.set()

        over = threading.Event()
        with pytest.raises(RankFailedError, match="rank 1 had not come") as caught:
            run_ranks(rank, 2, LIMIT)

        assert caught.value.rank == 0
        assert isinstance(caught.value.__cause__, StoreTimeoutError)

    def test_interrupt_of_the_caller_ends_the_ranks(self):
        """Ctrl-C while the main thread waits in spawn."""

        def rank(ctx):
            store = ctx.open_store("k", timeout=LIMIT)
            if ctx.rank == 0:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

            try:
                store.dest_get("never set")
            except AbortedError as error:
                told.append(str(error))
                raise

        told = []
        with pytest.raises(KeyboardInterrupt):
            spawn(rank, 2)

        assert len(told) == 2
        assert "KeyboardInterrupt" in told[0]


class TestSettings:
    @pytest.fixture(autouse=True)
    def intra_op_threads(self, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        before = torch.get_num_threads()
        torch.set_num_threads(4)
        yield
        assert torch.get_num_threads() == 4
        assert Background(torch.get_num_threads).result() == 4  # of new threads, too
        torch.set_num_threads(before)

    @pytest.mark.parametrize(("world_size", "each"), [(1, 4), (2, 2), (3, 1), (8, 1)])
    def test_intra_op_threads_are_divided_and_restored(self, world_size, each):
        assert spawn(lambda ctx: torch.get_num_threads(), world_size) == [each] * world_size

    def test_intra_op_threads_are_left_alone_where_omp_num_threads_is_set(self, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert spawn(lambda ctx: torch.get_num_threads(), 2) == [4, 4]

    def test_intra_op_threads_are_restored_after_a_failure(self):
        with pytest.raises(RankFailedError):
            spawn(lambda ctx: 1 / 0, 2)

    def test_intra_op_threads_are_restored_after_runs_that_overlap(self):
        def rank(ctx, mine, other):
            mine.set()
            assert other.wait(LIMIT)

        first, second = threading.Event(), threading.Event()
        runs = [
            Background(lambda: spawn(rank, 2, args=(first, second))),
            Background(lambda: spawn(rank, 4, args=(second, first))),
        ]
        for run in runs:
            run.result()

    def test_intra_op_threads_of_a_nested_run(self):
        def rank(ctx):
            inner = spawn(lambda ctx: torch.get_num_threads(), 2)
            return inner, torch.get_num_threads()

        assert spawn(rank, 2) == [([1, 1], 2)] * 2


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"fn": None}, TypeError, "fn must be callable"),
            ({"world_size": 0}, ValueError, "at least 1"),
            ({"world_size": True}, ValueError, "at least 1"),
            ({"world_size": 2.0}, ValueError, "at least 1"),
            ({"ranks_as": "fibers"}, ValueError, "'threads' or 'processes'"),
            ({"args": 5}, TypeError, r"args must be a sequence .* not 5"),
            ({"args": "ab"}, TypeError, r"args must be a sequence .* not 'ab'"),
            ({"rng": "own"}, ValueError, "'shared' or 'per-rank'"),
            ({"threads_per_process": 2}, UnsupportedOperationError, "threads_per_process is for ranks_as='processes'"),
            ({"threads_per_process": 0}, ValueError, "threads_per_process must be an int of at least 1, not 0"),
            ({"threads_per_process": True}, ValueError, "threads_per_process must be an int of at least 1"),
            ({"devices": ["cpu"]}, ValueError, "names 1 device for 2 ranks"),
            ({"devices": "tpu:0"}, ValueError, "tpu"),
            ({"devices": "banana"}, ValueError, "device 'banana': a rank's is 'cpu' or 'cuda:N'"),
            ({"devices": "mps"}, ValueError, "'cpu' or 'cuda:N'"),
        ],
        ids=repr,
    )
    def test_wrong_arguments_are_refused(self, arguments, error, match):
        with pytest.raises(error, match=match):
            spawn(**{"fn": lambda ctx: None, "world_size": 2, **arguments})

    @pytest.mark.parametrize(
        "devices", [None, "cpu", torch.device("cpu"), ["cpu", torch.device("cpu")], ("cpu", "cpu")]
    )
    def test_devices_are_one_for_all_or_one_each(self, devices):
        assert spawn(lambda ctx: ctx.device, 2, devices=devices) == ["cpu", "cpu"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
    def test_device_that_is_not_there_is_refused(self):
        with pytest.raises(ValueError, match="sees no CUDA device"):
            spawn(lambda ctx: None, 2, devices="cuda:0")

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    def test_device_of_a_rank_is_its_current_device(self):
        last = f"cuda:{torch.cuda.device_count() - 1}"

        def rank(ctx):
            return ctx.device, torch.empty(1, device="cuda").device.index

        assert spawn(rank, 2, devices=["cuda", last]) == [("cuda:0", 0), (last, torch.cuda.device_count() - 1)]

    def test_group_of_wrong_ranks_is_refused(self):
        def rank(ctx):
            for ranks in ([0, 0], [2], [-1], []):
                with pytest.raises(ValueError, match="different ones of 0 to 1, at least one, not"):
                    ctx.open_group("g", ranks)

            for ranks in (5, "01"):
                with pytest.raises(TypeError, match="must be a sequence of ranks, not"):
                    ctx.open_group("g", ranks)

        run_ranks(rank, 2, LIMIT)

    def test_spawn_is_public(self):
        assert dtorch_core.spawn is spawn
