"""What ranks of the producer's own process borrow, where another process has a rank too."""

from pathlib import Path

import pytest
import torch

from dtorch_core.testing._layouts import LAYOUTS

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from file_store_ranks import HOMES, on_ranks

MANY = 1 << 20
"""So many numbers do not ride in a message."""


@pytest.fixture(autouse=True)
def two_and_one(monkeypatch):
    """Rank 0 and rank 1 share a process, as it were; rank 2 has its own."""
    monkeypatch.setattr(HOMES, lambda topology: [0, 0, 1])


def borrowed(tensor, **how):
    """Of what rank 0 publishes: the storage's bytes on rank 1 and rank 2, and what they read."""

    def body(store):
        if store.rank == 0:
            with store.publish("k", tensor, 2, **how):
                return None

        with store.borrow("k") as got:
            return got.untyped_storage().nbytes(), got.clone()

    return on_ranks(body, 3)[1:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_storage_spans_the_bytes_that_the_view_addresses(layout):
    sent = LAYOUTS[layout]()
    last = sum((size - 1) * step for size, step in zip(sent.shape, sent.stride(), strict=True))
    for nbytes, value in borrowed(sent):
        assert nbytes <= ((last + 1) * sent.element_size() if sent.numel() else 0)
        assert torch.equal(value, sent)


@pytest.mark.parametrize("how", [{}, {"writable": True}], ids=["read", "written"])
def test_storage_of_a_large_one_does_so_too(how):
    sent = torch.arange(3 * MANY)[MANY : 2 * MANY]
    for nbytes, value in borrowed(sent, **how):
        assert nbytes == sent.nbytes
        assert torch.equal(value, sent)


@pytest.mark.parametrize("numel", [100, MANY])
def test_memory_of_the_store_is_not_copied(numel):
    """A part of what the store gave is published where it lies, to ranks of both processes."""

    def body(store):
        if store.rank == 0:
            memory = store.empty((2 * numel,), dtype=torch.int64).zero_()
            with store.publish("k", memory[numel:], 2, writable=True):
                pass

            return memory[numel:].data_ptr(), memory[numel:].unique().tolist(), memory[:numel].any().item()

        with store.borrow("k") as got:
            got[store.rank :: 2] = store.rank
            return got.data_ptr(), got.untyped_storage().nbytes()

    (lies, written, around), (near, near_bytes), (_, far_bytes) = on_ranks(body, 3)
    assert (written, around) == ([0, 1, 2], False)
    assert near == lies
    assert near_bytes == far_bytes == 8 * numel
