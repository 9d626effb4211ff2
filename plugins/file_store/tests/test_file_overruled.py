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


def test_rank_that_got_what_does_not_count_is_not_waited_for():
    """Ranks 1 and 2 hear of rank 0's set only when rank 2 has got and finished what rank 1 had set."""
    steps = {name: threading.Event() for name in ("deaf 1", "deaf 2", "set", "finished")}

    def body(store):
        store.barrier()
        if store.rank == 0:
            assert steps["deaf 1"].wait(LIMIT) and steps["deaf 2"].wait(LIMIT)
            store.src_set("k", values(0), 1)
            steps["set"].set()
            with pytest.raises(KeyInUseError, match="rank 0 and rank 1 set it at the same time, and rank 2 got"):
                store.src_wait_until_get_finished("k")
        else:
            link = store._session.node.links[0]
            pull = link.pull
            link.pull = lambda: pull() if steps["finished"].is_set() else None
            steps[f"deaf {store.rank}"].set()
            assert steps["set"].wait(LIMIT)
            if store.rank == 1:
                store.src_set("k", values(1), 1)
                assert steps["finished"].wait(LIMIT)
                store._session.node.look()
                with pytest.raises(KeyInUseError, match="at the same time, and that of rank 0 counts"):
                    store.src_wait_until_get_finished("k")
            else:
                assert store.dest_get("k").tolist() == values(1).tolist()
                store.dest_finish_get("k")
                steps["finished"].set()

        store.barrier()
        with pytest.raises(StoreTimeoutError):
            store.dest_get("k", timeout=0.01)

        with pytest.raises(ProtocolError):
            store.dest_finish_get("k")

        store.barrier()
        if store.rank == 1:  # the key is free
            store.src_set("k", values(7), 2)
            store.src_wait_until_get_finished("k")
        else:
            assert store.dest_get("k").tolist() == values(7).tolist()
            store.dest_finish_get("k")

    on_ranks(body, 3)


@pytest.mark.parametrize("consumers", [1, 2])
def test_ranks_that_set_a_key_at_once_are_told_and_nobody_hangs(consumers):
    """A finish is of what was got, and each producer's wait ends: one at least with an error."""

    def body(store):
        ends = []
        for number in range(100):
            key = f"k{number}"
            store.barrier()
            if store.rank >= 2:
                got = store.dest_get(key)
                assert got.tolist() in (values(0).tolist(), values(1).tolist())
                store.dest_finish_get(key)
                store.barrier()
                with pytest.raises(ProtocolError):
                    store.dest_finish_get(key)

                continue

            ends.append("read")
            try:
                store.src_set(key, values(store.rank), consumers)
            except KeyInUseError:
                ends[-1] = "refused"

            store.barrier()
            if ends[-1] == "read":
                try:
                    store.src_wait_until_get_finished(key)
                except KeyInUseError:
                    ends[-1] = "refused"

        return ends

    zero, one, *_ = on_ranks(body, 2 + consumers)
    for ends in zip(zero, one, strict=True):
        assert "refused" in ends


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
