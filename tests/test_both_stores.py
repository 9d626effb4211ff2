"""What holds for the store of threads and for the one of processes alike, and is no contract of every store."""

import gc
import threading

import pytest
import torch

from dtorch_core import AbortedError, StoreTimeoutError, UnsupportedTensorError, use_backend
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


@pytest.mark.parametrize("nodes", ["apart", "together"])
def test_closed_store_gives_no_memory(backend, nodes, monkeypatch):
    """As every other call of it; also where other ranks of the process have it open."""
    if nodes == "together":
        monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: [0] * len(topology))

    def body(ctx):
        store = ctx.open_store("own", backend=backend, timeout=LIMIT)
        store.barrier()
        if store.rank == 0:
            store.close()
            calls = [lambda: store.empty((2,), dtype=torch.float32), lambda: store.src_set("k", torch.ones(2), 1)]
            for call in calls:
                with pytest.raises(AbortedError, match=r"^store 'own', rank 0: it is closed; open it anew$"):
                    call()

            closed.set()
        else:
            assert closed.wait(LIMIT)
            assert store.empty((2,), dtype=torch.float32).shape == (2,)
            store.close()

    closed = threading.Event()
    run_ranks(body, 2, 2 * LIMIT)


@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"])
def test_integers_viewed_as_quantized_are_refused_by_name(backend, name):
    """No quantized tensor: torch can't copy it all the same."""
    viewed = torch.arange(8, dtype=torch.int32 if name == "qint32" else torch.uint8).view(getattr(torch, name))
    assert not viewed.is_quantized

    def body(ctx):
        with ctx.open_store("own", backend=backend, timeout=LIMIT) as store:
            for writable in (False, True):
                with pytest.raises(UnsupportedTensorError, match=rf"^src_set\('k'\): .* torch\.{name} .*view\(\)"):
                    store.src_set("k", viewed, 1, writable=writable)

            store.barrier()

        with use_backend(store=backend), ctx.open_group("group", timeout=LIMIT) as group:
            with pytest.raises(UnsupportedTensorError, match=rf"torch\.{name} .*view\(\)"):
                group.broadcast(viewed, 0)

    run_ranks(body, 2, 2 * LIMIT)


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
