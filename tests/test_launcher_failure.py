"""spawn: how a run of threads ends when a rank fails, hangs or is interrupted."""

import gc
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest

from dtorch_core import AbortedError, PeerLostError, ProtocolError, RankFailedError, StoreTimeoutError, spawn
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import thread_runs
    from thread_runs import LIMIT, PROMPT

driver = thread_runs.driver
nothing_outlives_a_run = thread_runs.nothing_outlives_a_run


class Held:
    """Something that a rank has."""


class TestFailure:
    def test_what_failed_ranks_had_goes_with_the_error(self):
        """Not only when Python's collector comes by: a promise that a failed rank held, say, is awaited by somebody."""
        had = []

        def failing_function(ctx):
            mine = Held()
            had.append(weakref.ref(mine))
            store = ctx.open_store("k", timeout=LIMIT)
            if ctx.rank == 1:
                raise KeyError("lost on purpose")

            store.dest_get("never set")

        gc.collect()
        gc.disable()
        try:
            with pytest.raises(RankFailedError):
                spawn(failing_function, 3)

            assert [each() for each in had] == [None] * 3
        finally:
            gc.enable()

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
