"""Hooks for all modules and optimizers: those of a rank that is a thread are called in the rank's threads."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils import module_tracker
from torch.utils.flop_counter import FlopCounterMode

from dtorch_core import spawn

LIMIT = 60.0
WORLD_SIZE = 4


def run(fn):
    return spawn(fn, WORLD_SIZE, torch_distributed=True, timeout=LIMIT)


@pytest.fixture(autouse=True)
def undone():
    def state():
        names = "register_module_forward_pre_hook", "register_module_forward_hook"
        functions = [getattr(owner, name) for owner in (module, module_tracker) for name in names]
        return [*functions, optimizer.register_optimizer_step_pre_hook]

    before = state()
    yield
    assert state() == before
    assert not module._has_any_global_hook()


def network():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_hook_is_called_for_its_ranks_modules(kind):
    there = threading.Barrier(WORLD_SIZE, timeout=LIMIT)

    def rank(ctx):
        called, layer, given = [], nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        handle = getattr(module, f"register_module_{kind}_hook")(lambda owner, *values: called.append(owner))
        there.wait()
        thread = threading.Thread(target=lambda: layer(given).sum().backward())
        thread.start()
        thread.join(LIMIT)
        layer(given).sum().backward()
        there.wait()
        handle.remove()
        layer(given).sum().backward()
        return [owner is layer for owner in called]

    assert run(rank) == [[True, True]] * WORLD_SIZE


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_hook_is_called_for_its_ranks_optimizers(kind):
    there = threading.Barrier(WORLD_SIZE, timeout=LIMIT)

    def rank(ctx):
        called, own = [], torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        handle = getattr(optimizer, f"register_optimizer_step_{kind}_hook")(lambda owner, *rest: called.append(owner))
        there.wait()
        own.step()
        there.wait()
        handle.remove()
        own.step()
        return [owner is own for owner in called]

    assert run(rank) == [[True]] * WORLD_SIZE


def test_a_hook_of_no_rank_is_called_for_all():
    called = []
    handle = module.register_module_forward_pre_hook(lambda owner, values: called.append(owner.out_features))
    try:
        run(lambda ctx: nn.Linear(2, 2 + ctx.rank)(torch.ones(1, 2)))
    finally:
        handle.remove()

    assert sorted(called) == [2, 3, 4, 5]


def test_what_a_hook_returns_counts():
    def rank(ctx):
        handle = module.register_module_forward_hook(lambda owner, values, result: result * 0 + ctx.rank)
        dist.barrier()
        result = nn.Linear(2, 1)(torch.ones(1, 2)).item()
        dist.barrier()
        handle.remove()
        return result

    assert run(rank) == [0, 1, 2, 3]


def test_each_rank_counts_its_own_operations():
    def rank(ctx):
        model = nn.parallel.DistributedDataParallel(network())
        for _ in range(5):
            with FlopCounterMode(display=False) as counter:
                model(torch.ones(2, 16, requires_grad=True)).sum().backward()

            found = counter.get_total_flops(), sorted(counter.get_flop_counts())

        return found

    model = "DistributedDataParallel.module"
    names = ["DistributedDataParallel", model, f"{model}.0", f"{model}.2", "Global"]
    assert run(rank) == [(6144, names)] * WORLD_SIZE


def test_each_rank_counts_its_own_collectives():
    def rank(ctx):
        model = network()
        parallelize_module(
            model, init_device_mesh("cpu", (WORLD_SIZE,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        for _ in range(5):
            with CommDebugMode() as counter:
                model(torch.ones(2, 16, requires_grad=True)).sum().backward()

        return counter.get_total_counts(), sorted(counter.get_parameter_info())

    assert run(rank) == [(2, ["Sequential.0", "Sequential.2"])] * WORLD_SIZE
