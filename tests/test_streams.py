"""What the allocator is told. Of stand-ins: no GPU is needed."""

from __future__ import annotations

import pytest
import torch

from dtorch_core import streams

VIEWS = {
    "as it is": lambda tensor: tensor,
    "conjugate": lambda tensor: tensor.conj(),
    "negative": lambda tensor: torch._neg_view(tensor),
    "conjugate and negative": lambda tensor: torch._neg_view(tensor.conj()),
    "imaginary part": lambda tensor: tensor.conj().imag,
}


class OnGpu(torch.Tensor):
    """One that says that it is on a GPU."""

    told = []
    is_cuda = True

    def record_stream(self, stream):
        self.told.append((self.data_ptr(), self.is_conj(), self.is_neg(), stream))


@pytest.mark.parametrize("view", VIEWS)
def test_the_allocator_is_told_of_the_memory_itself(view, monkeypatch):
    """Not of the copy that torch makes to read a view by its bits."""
    monkeypatch.setattr(OnGpu, "told", [])
    tensor = VIEWS[view](torch.ones(3, dtype=torch.complex64).as_subclass(OnGpu))
    streams.keep_until_done(tensor, "the stream")
    assert OnGpu.told == [(tensor.data_ptr(), False, False, "the stream")]


def test_of_the_cpu_there_is_nothing_to_tell():
    streams.keep_until_done(torch.ones(3))
