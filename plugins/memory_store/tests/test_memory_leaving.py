"""Ranks that leave, die or drop their handle: what the others learn, and what is let go."""

import array
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch

from dtorch_core import PeerLostError
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from memory_ranks import LIMIT, on_ranks


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
