"""What holds for the store of threads and for the one of processes alike, and is no contract of every store."""

import gc
import threading

import pytest
import torch

from dtorch_core import StoreTimeoutError
from dtorch_core.testing import run_ranks

LIMIT = 15.0


@pytest.fixture(params=["memory", "file"])
def backend(request, monkeypatch):
    """In the store of processes each rank is a node: whatever it says goes over a socket."""
    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))
    return request.param


@pytest.mark.parametrize("gate", ["barrier", "reset"])
def test_who_gave_up_a_moment_earlier_is_not_missing(backend, gate):
    turns = [threading.Event() for _ in range(3)]

    def body(ctx):
        with ctx.open_store("own", backend=backend, timeout=LIMIT) as store:
            return late(store)

    def late(store):
        if store.rank == 3:
            assert turns[2].wait(LIMIT)
            return ""

        assert store.rank == 0 or turns[store.rank - 1].wait(LIMIT)
        with pytest.raises(StoreTimeoutError) as raised:
            getattr(store, gate)(timeout=0.05)

        turns[store.rank].set()
        assert turns[2].wait(LIMIT)
        return str(raised.value)

    said = run_ranks(body, 4, 2 * LIMIT)
    assert "rank 1, rank 2, rank 3 had not come after 0.05 s" in said[0]
    assert said[1].endswith(f"{gate}(): rank 2, rank 3 had not come after 0.05 s")
    assert said[2].endswith(f"{gate}(): rank 3 had not come after 0.05 s")


def test_handle_collected_under_a_lock_that_a_callback_takes(backend):
    lock, over, took = threading.Lock(), threading.Event(), []

    def body(ctx):
        store = ctx.open_store("own", backend=backend, timeout=LIMIT)
        store.barrier()
        if store.rank == 0:

            def callback():
                took.append(lock.acquire(timeout=LIMIT))
                over.set()

            store.expect(1, 0).add_done_callback(callback)
            cycle = [store]
            cycle.append(cycle)
            del store, cycle
            with lock:
                gc.collect()

        assert over.wait(2 * LIMIT)

    gc.disable()
    try:
        run_ranks(body, 2, 4 * LIMIT)
    finally:
        gc.enable()

    assert took == [True]


@pytest.mark.parametrize("when", ["one by one", "all before"])
def test_chain_of_callbacks_may_be_long(backend, when):
    """Each listens for the next message, and sends one: they are called one after the other, not one in the other."""
    count = 1500

    def body(ctx):
        with ctx.open_store("own", backend=backend, timeout=LIMIT) as store:
            other, taken, over = 1 - store.rank, [], threading.Event()

            def take(receipt):
                taken.append(receipt.wait(0)[0].item())
                if len(taken) == count:
                    over.set()
                    return

                if when == "one by one":  # before the next one can be taken, in whatever thread
                    store.send(torch.tensor(len(taken)), other, 1)

                listen()

            def listen():
                receipt = store.expect(other, 1)
                receipt.add_done_callback(lambda: take(receipt))

            for number in range(count if when == "all before" else 1):
                store.send(torch.tensor(number), other, 1)

            store.barrier()
            listen()
            assert over.wait(LIMIT), len(taken)
            store.barrier()
            return taken

    assert run_ranks(body, 2, 2 * LIMIT) == [list(range(count))] * 2
