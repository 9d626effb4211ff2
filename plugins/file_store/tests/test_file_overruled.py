"""Two ranks seem to set one key at once, and a rank is interrupted: what others borrow stays as it is, nobody hangs."""

import threading
import time
from pathlib import Path

import pytest
import torch
from dtorch_file_store.values import ArrivedValue
from dtorch_file_store.waiting import Waiter

from dtorch_core import KeyInUseError, ProtocolError, StoreTimeoutError
from dtorch_core.testing import Background, asleep

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from file_store_ranks import LIMIT, node_each, on_ranks, values

__all__ = ["node_each"]
pytestmark = pytest.mark.usefixtures("node_each")
LARGE = 100_000


def test_what_an_overruled_rank_had_set_stays_while_others_read_it():
    """Rank 2 hears of rank 0's older set only after its own, as if they came at once, and sets other keys meanwhile."""
    steps = {name: threading.Event() for name in ("freed", "set", "borrowed", "reused", "read")}

    def body(store):
        store.barrier()
        if store.rank == 0:
            store.src_set("k", values(0, LARGE), 1)
            store.src_wait_until_get_finished("k")
            steps["freed"].set()
        elif store.rank == 1:
            store.dest_get("k")
            store.dest_finish_get("k")
            assert steps["set"].wait(LIMIT)
            with store.borrow("k") as got:
                steps["borrowed"].set()
                assert steps["reused"].wait(LIMIT)
                assert torch.equal(got, values(2, LARGE))

            steps["read"].set()
        else:
            link, late = store._session.node.links[0], threading.Event()
            pull = link.pull
            link.pull = lambda: pull() if late.is_set() else None
            assert steps["freed"].wait(LIMIT)
            store.src_set("k", values(2, LARGE), 1)
            steps["set"].set()
            assert steps["borrowed"].wait(LIMIT)
            late.set()
            with pytest.raises(KeyInUseError, match="at the same time"):
                store.src_wait_until_get_finished("k")

            for number in range(4):
                store.src_set(f"other {number}", values(50 + number, LARGE), 1)

            steps["reused"].set()
            assert steps["read"].wait(LIMIT)

    on_ranks(body, 3)


def test_key_that_was_freed_is_set_though_its_older_set_is_unread():
    """It has arrived, and this rank has handled nothing since."""
    freed, done = threading.Event(), threading.Event()

    def body(store):
        store.barrier()
        if store.rank == 0:
            store.src_set("k", values(0), 1)
            store.src_wait_until_get_finished("k")
            freed.set()
        elif store.rank == 1:
            assert store.dest_get("k").tolist() == values(0).tolist()
            store.dest_finish_get("k")
            assert store.dest_get("k").tolist() == values(2).tolist()
            store.dest_finish_get("k")
        else:
            assert freed.wait(LIMIT)
            store.src_set("k", values(2), 1)
            store.src_wait_until_get_finished("k")
            done.set()

    for _ in range(20):
        freed.clear()
        done.clear()
        on_ranks(body, 3)
        assert done.is_set()


def test_finish_gives_up_a_share_whose_borrow_failed(monkeypatch):
    borrow = ArrivedValue.borrow

    def body(store):
        if store.rank == 0:
            store.src_set("k", values(0), 2)
            store.barrier()
        else:
            if store.rank == 1:

                def interrupted(*_):
                    monkeypatch.setattr(ArrivedValue, "borrow", borrow)
                    raise KeyboardInterrupt

                monkeypatch.setattr(ArrivedValue, "borrow", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    store.dest_get("k")

                store.dest_finish_get("k")
                with pytest.raises(StoreTimeoutError):
                    store.dest_get("k", timeout=0.05)

                with pytest.raises(ProtocolError):
                    store.dest_finish_get("k")

            store.barrier()

        if store.rank == 2:
            assert store.dest_get("k").tolist() == values(0).tolist()
            store.dest_finish_get("k")
        elif store.rank == 0:
            store.src_wait_until_get_finished("k")

    on_ranks(body, 3)


def test_thread_that_is_interrupted_as_it_wakes_goes_on(monkeypatch):
    """As Ctrl-C does: the wake-up is taken, and whoever waits does not learn it."""
    sleep, interrupted = Waiter.sleep, threading.Event()

    def slept(self, timeout):
        woken = sleep(self, timeout)
        if woken and threading.current_thread().name == "second" and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

        return woken

    monkeypatch.setattr(Waiter, "sleep", slept)

    def body(store):
        if store.rank == 0:
            store.barrier()
            store.src_set("b", values(1), 1)
            store.src_set("a", values(0), 1)
            store.barrier()
            return

        first = Background(lambda: store.dest_get("a").tolist())
        asleep(first)  # it reads; the second one sleeps until it is told
        second = Background(lambda: store.dest_get("b").tolist(), "second")
        asleep(second)
        store.barrier()
        assert first.result(LIMIT) == values(0).tolist()
        start = time.monotonic()
        try:
            second.result(LIMIT)
        except KeyboardInterrupt:
            assert interrupted.is_set()
            assert store.dest_get("b").tolist() == values(1).tolist()  # it can be asked again

        assert time.monotonic() - start < LIMIT
        store.barrier()

    on_ranks(body, 2)
    assert interrupted.is_set()
