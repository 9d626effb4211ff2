"""Ranks of a file store that are threads of this process, each a node of its own."""

import pytest
import torch

from dtorch_core.testing import run_ranks

LIMIT = 20.0

HOMES = "dtorch_file_store.opening.homes_of"


def values(tag, numel=7):
    return torch.arange(numel) + 1000 * (tag + 1)


@pytest.fixture
def node_each(monkeypatch, request):
    """Each rank is a node: whatever it says goes over a socket, though its peer is a thread beside it."""
    skip_processes(request)
    monkeypatch.setattr(HOMES, lambda topology: list(range(len(topology))))


def skip_processes(request):
    if "process" in request.function.__name__:
        pytest.skip("its ranks are processes: nothing that is set in this one reaches them")

    device = request.node.callspec.params.get("device", "cpu") if hasattr(request.node, "callspec") else "cpu"
    if device != "cpu" or "cuda" in getattr(request.function, "capabilities", ()):
        pytest.skip("a process can't map its own memory of a GPU: test_file_cuda.py has a way round that")


def on_ranks(body, world_size):
    def rank(ctx):
        with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
            return body(store)

    return run_ranks(rank, world_size, 2 * LIMIT)
