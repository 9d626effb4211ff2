"""Thread ranks with a torch.distributed of their own: DTensors and meshes."""

import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from thread_world_ranks import LIMIT, rows, run


class TestTensors:
    def test_dtensors_of_different_ranks_are_kept_apart(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        whole = torch.arange(48.0).view(8, 6)

        def rank(ctx):
            mesh = init_device_mesh("cpu", (2, 2))
            x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
            turned = x.redistribute(mesh, [Shard(1), Replicate()]).redistribute(mesh, [Shard(0), Shard(1)])
            return (x @ x.T).full_tensor(), turned.to_local(), (x.sum() + 1).full_tensor()

        for number, (product, shard, total) in enumerate(run(rank)):
            assert torch.equal(product, whole @ whole.T)
            assert torch.equal(shard, whole.chunk(2)[number // 2].chunk(2, 1)[number % 2])
            assert total == whole.sum() + 1

    def test_loss_parallel_is_the_ranks_that_is_in_it(self):
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import loss_parallel

        logits, classes = torch.arange(12.0).view(3, 4).sin(), torch.tensor([3, 0, 2])
        one_is_out = threading.Event()

        def rank(ctx):
            mesh = init_device_mesh("cpu", (2,))
            x = distribute_tensor(logits.clone().requires_grad_(), mesh, [Shard(1)])
            alone = DTensor.from_local(logits, mesh, [Replicate()])
            with loss_parallel():
                nn.functional.cross_entropy(x, classes).backward()
                if ctx.rank == 1:
                    assert one_is_out.wait(LIMIT)

            logged = torch.log_softmax(alone, 1).to_local()
            one_is_out.set()
            return x.grad.full_tensor(), logged

        expected = logits.clone().requires_grad_()
        nn.functional.cross_entropy(expected, classes).backward()
        for grad, logged in run(rank, 2):
            torch.testing.assert_close(grad, expected.grad)
            torch.testing.assert_close(logged, torch.log_softmax(logits, 1))

    def test_meshes_of_different_ranks_differ(self):
        meshes = run(lambda ctx: init_device_mesh("cpu", (2,)), 2)
        assert meshes[0] != meshes[1] and hash(meshes[0]) != hash(meshes[1])

    def test_a_mesh_that_another_rank_has_pickled_is_this_ranks(self):
        sent = []
        there = threading.Event()

        def rank(ctx):
            mesh = init_device_mesh("cpu", (2,))
            if ctx.rank == 0:
                sent.append(pickle.dumps(mesh))
                there.set()

            assert there.wait(LIMIT)
            received = pickle.loads(sent[0])
            assert received.get_group() is dist.group.WORLD
            return functional.all_reduce(rows(ctx.rank), "sum", received).wait()

        for total in run(rank, 2):
            assert torch.equal(total, rows(0) + rows(1))
