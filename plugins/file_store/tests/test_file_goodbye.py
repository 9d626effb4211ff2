"""What lies in a process when its last rank leaves, and is still to be read by others. That matters for the memory of
devices; here shared memory stands in for it.
"""

import threading
import time

import pytest
import torch
from dtorch_file_store import gpu
from dtorch_file_store.values import SharedValue

from dtorch_core.testing import run_ranks

LIMIT = 20.0


def values(tag, numel=1 << 16):
    return torch.arange(numel) + 1000 * tag


@pytest.fixture(autouse=True)
def nodes(monkeypatch):
    """Each rank is a node, and shared memory has to be given back as a device's has."""
    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))
    monkeypatch.setattr(SharedValue, "marks", True)
    monkeypatch.setattr(gpu, "_left", [])


def on_ranks(body):
    def rank(ctx):
        with ctx.open_store("goodbye", backend="file", timeout=LIMIT) as store:
            return body(store)

    return run_ranks(rank, 2, LIMIT)


class TestLetters:
    def test_goodbye_waits_until_a_message_is_copied_out(self):
        closing = threading.Event()

        def body(store):
            if store.rank == 0:
                for tag in range(3):
                    store.send(values(tag), 1, tag)

                begun = time.monotonic()
                closing.set()
                store.close()
                return time.monotonic() - begun

            assert closing.wait(LIMIT)
            time.sleep(0.2)
            for tag in range(3):
                got, source = store.expect(0, tag).wait(LIMIT)
                assert source == 0
                assert torch.equal(got, values(tag))

            return None

        took, _ = on_ranks(body)
        assert 0.2 <= took < 0.9
        assert gpu._left == []

    def test_message_that_nobody_takes_costs_a_moment_and_is_not_let_go(self):
        closed = threading.Event()

        def body(store):
            if store.rank == 0:
                store.send(values(5), 1, 0)
                begun = time.monotonic()
                store.close()
                took = time.monotonic() - begun
                closed.set()
                return took

            assert closed.wait(LIMIT)
            return None

        took, _ = on_ranks(body)
        assert 1.0 <= took < 3.0
        (left,) = gpu._left
        assert torch.equal(left.borrow(None), values(5))

    def test_receiver_that_leaves_is_not_waited_for(self):
        gone = threading.Event()

        def body(store):
            if store.rank == 1:
                store.close()
                gone.set()
                return None

            store.send(values(5), 1, 0)
            begun = time.monotonic()
            store.close()
            took = time.monotonic() - begun
            assert gone.wait(LIMIT)
            return took

        took, _ = on_ranks(body)
        assert took < 0.9
