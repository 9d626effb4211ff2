"""The driver starts the fused kernels, in any thread and under graph capture."""

import threading

import pytest
import torch
from dtorch_samedevice_group import fused, fused_again, fused_launch
from dtorch_samedevice_group.fused_again import Again
from dtorch_samedevice_group.fused_start import Kernel, Start
from dtorch_samedevice_group.recipes import Recipe

GPU = "cuda:0"
LIMIT = 60.0
HOW = Recipe("add", False, torch.float32, torch.float32)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(not fused_launch.launcher.usable, reason="fused kernels are turned off"),
]


@pytest.fixture
def launcher(monkeypatch):
    own = fused_launch.Launcher()
    monkeypatch.setattr(fused, "launcher", own)
    monkeypatch.setattr(fused_again, "launcher", own)
    return own


def reduce(again, tensors):
    where = again.where(tensors)
    if not again.done(where, tensors):
        assert again.left(where, lambda: fused.reduce_in_place(HOW, [tensors])) == []


@pytest.mark.parametrize("size", [1, 1023, 5000, 1_000_003])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_no_other_numbers_arrive_than_given(launcher, size, ranks):
    again = Again()
    for turn in range(3):
        tensors = [torch.arange(size, dtype=torch.float32, device=GPU).add_(rank + turn) for rank in range(ranks)]
        wanted = sum(tensors[1:], tensors[0])
        for _ in range(2):
            values = [tensor.clone() for tensor in tensors]
            reduce(again, tensors)
            assert all(torch.equal(tensor, wanted) for tensor in tensors)
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    (compiled, _), *others = launcher._compiled.values()
    assert not others and isinstance(compiled, Kernel)
    assert launcher.usable and all(isinstance(start, Start) for _, start in again._known.values())


def test_in_a_thread_that_has_not_used_cuda(launcher):
    again, tensors = Again(), [torch.full((1000,), 1.0, device=GPU) for _ in range(2)]
    reduce(again, tensors)
    ((device, start),) = again._known.values()
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: start(stream=0))
    thread.start()
    thread.join(LIMIT)
    torch.cuda.synchronize()
    assert device == 0 and torch.equal(tensors[0], torch.full_like(tensors[0], 4.0))


def test_on_the_stream_that_it_is_given(launcher):
    again, tensors = Again(), [torch.full((1000,), 1.0, device=GPU) for _ in range(2)]
    reduce(again, tensors)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        reduce(again, tensors)
        assert not side.query(), "the kernel runs elsewhere, or the host waited"
        side.synchronize()

    assert torch.equal(tensors[1], torch.full_like(tensors[1], 4.0))


def test_captured_into_a_graph(launcher):
    again, tensors = Again(), [torch.full((1000,), 1.0, device=GPU) for _ in range(2)]
    reduce(again, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduce(again, tensors)

    torch.cuda.synchronize()
    assert torch.equal(tensors[0], torch.full_like(tensors[0], 2.0)), "captured, not run"
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(tensors[0], torch.full_like(tensors[0], 8.0))
