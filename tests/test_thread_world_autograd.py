"""Thread ranks with a torch.distributed of their own: collectives in backward, and training."""

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import thread_world_ranks
    from thread_world_ranks import rows, run

level = thread_world_ranks.level


class TestAutograd:
    def test_collectives_in_backward_are_the_ranks_own(self):
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                total = grad.clone()
                dist.all_reduce(total)
                return functional.all_reduce(total, "sum", dist.group.WORLD).wait()

        def rank(ctx):
            x = rows(ctx.rank).requires_grad_()
            (Sum.apply(x) * rows(ctx.rank)).sum().backward()
            return x.grad

        for grad in run(rank):
            assert torch.equal(grad, 4 * sum(map(rows, range(4))))

    @pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce is deprecated")
    @pytest.mark.parametrize("imported", ["before", "in a rank", "with a group"])
    def test_collectives_that_have_a_gradient_are_the_ranks_own(self, monkeypatch, imported):
        name = "torch.distributed.nn.functional"
        monkeypatch.delitem(sys.modules, name, raising=False)
        if imported != "in a rank":
            hook = sys.excepthook
            if imported == "with a group":
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

            module = importlib.import_module(name)
            before = module.all_reduce.__defaults__
            if imported == "with a group":
                dist.destroy_process_group()
                sys.excepthook, distributed_c10d._backend = hook, None

        def rank(ctx):
            y = rows(ctx.rank).requires_grad_()
            total = importlib.import_module(name).all_reduce(y * (ctx.rank + 1))
            total.sum().backward()
            return total.detach(), y.grad

        for number, (total, grad) in enumerate(run(rank)):
            assert torch.equal(total, sum(rows(other) * (other + 1) for other in range(4)))
            assert torch.equal(grad, torch.full((4,), 4.0 * (number + 1)))

        after = importlib.import_module(name).all_reduce.__defaults__
        if imported == "in a rank":
            assert after[1] is None
        else:
            assert after is before

    @pytest.mark.parametrize("level", ["OFF", "DETAIL"], indirect=True)
    @pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
    def test_training_is_that_of_one_rank(self, sharded, level):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        x, y = torch.randn(8, 8), torch.randn(8, 4)

        def train(model, x, y):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()

        def rank(ctx):
            own = copy.deepcopy(model)
            if sharded:
                from torch.distributed.fsdp import fully_shard

                mesh = init_device_mesh("cpu", (4,))
                for layer in (own[0], own[2], own):
                    fully_shard(layer, mesh=mesh)

                train(own, x.chunk(4)[ctx.rank], y.chunk(4)[ctx.rank])
                return [parameter.full_tensor().detach() for parameter in own.parameters()]

            train(nn.parallel.DistributedDataParallel(own), x.chunk(4)[ctx.rank], y.chunk(4)[ctx.rank])
            return [parameter.detach() for parameter in own.parameters()]

        results = run(rank)
        train(model, x, y)
        for parameters in results:
            for own, expected in zip(parameters, model.parameters(), strict=True):
                torch.testing.assert_close(own, expected.detach(), rtol=1e-5, atol=1e-6)

    def test_ddp_is_told_who_left(self):
        def rank(ctx):
            model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
            if ctx.rank == 0:
                return "left"

            with pytest.raises(RuntimeError, match=r"rank 0 .*has left"):  # C++ reads the future of the all_reduce
                model(rows(ctx.rank, 3)).sum().backward()

        assert run(rank, 2)[0] == "left"
