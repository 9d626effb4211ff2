"""Ranks that are threads and have a torch.distributed of their own, and what they do alike everywhere."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from dtorch_core import spawn

LIMIT = 30.0


def run(fn, world_size=4, **named):
    return spawn(fn, world_size, torch_distributed=True, timeout=LIMIT, **named)


def rows(rank, count=4):
    """Values that say whose they are, and where."""
    return torch.arange(float(count)) + 10 * rank


@pytest.fixture
def elsewhere(monkeypatch):
    """This file as a module that other processes can import."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module(__name__)


def from_every_kind_of_group(ctx):
    """What needs to hold wherever the ranks are."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = rows(rank)
    dist.all_reduce(x)
    gathered = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(gathered, rows(rank))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rows(rank)
    dist.all_reduce(half, group=halves[rank // 2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row = functional.all_reduce(rows(rank), "sum", mesh["tp"]).wait()
    return rank, world_size, x, torch.stack(gathered), half, row, [member == ctx.rank for member in (rank,)]


def check_every_kind_of_group(results):
    for rank, (own, world_size, total, gathered, half, row, same) in enumerate(results):
        first = rank // 2 * 2
        assert (own, world_size, same) == (rank, 4, [True])
        assert torch.equal(total, sum(map(rows, range(4))))
        assert torch.equal(gathered, torch.stack([*map(rows, range(4))]))
        assert torch.equal(half, rows(first) + rows(first + 1))
        assert torch.equal(row, rows(first) + rows(first + 1))


@pytest.fixture
def level(request):
    """The level of torch's own checks, as TORCH_DISTRIBUTED_DEBUG sets it."""
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, request.param))
    yield request.param
    dist.set_debug_level(before)
