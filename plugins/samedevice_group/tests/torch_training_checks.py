"""What is trained on several ranks, with torch's own parallel modules and inside backward."""

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch_checks import expect_equal, part, total


class TrainingChecks:
    """Each method is one check, and is called on every rank."""

    def device_mesh_and_dtensor(self):
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

        full = torch.arange(4.0 * self.world * self.world).view(4 * self.world, self.world)
        for mesh in (init_device_mesh("cpu", (self.world,)), DeviceMesh.from_group(dist.group.WORLD, "cpu")):
            sharded = distribute_tensor(full, mesh, [Shard(0)])
            expect_equal(sharded.full_tensor(), full)
            expect_equal(sharded.redistribute(mesh, [Shard(1)]).to_local(), full[:, self.rank : self.rank + 1])
            expect_equal((sharded @ sharded.redistribute(mesh, [Replicate()]).T).full_tensor(), full @ full.T)
            summed = DTensor.from_local(full + self.rank, mesh, [Partial()]).redistribute(mesh, [Shard(0)])
            expect_equal(summed.full_tensor(), full * self.world + sum(self.ranks))

        if self.world % 2 == 0:
            mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("rows", "columns"))
            sharded = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
            expect_equal(sharded.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), full)
            assert mesh["columns"].get_group().size() == self.world // 2

    def ddp(self):
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(self.rank)  # rank 0's weights count
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
        alone = copy.deepcopy(net)
        model(part(self.rank).view(1, 4)).sum().backward()
        torch.stack([alone(part(rank).view(1, 4)).sum() for rank in self.ranks]).mean().backward()
        for mine, reference in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, reference.grad)

        with model.join():
            for _ in range(1 + self.rank):  # ranks have different numbers of batches
                model(torch.ones(3, 4)).sum().backward()

    def ddp_averaged_over_those_who_are_left(self):
        """The Work that asks who is left is C++'s alone."""
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        with model.join(divide_by_initial_world_size=False):
            for step in range(1 + self.rank):
                model.zero_grad()
                model(torch.full((1, 2), self.rank + 1.0)).sum().backward()
                left = [rank + 1.0 for rank in self.ranks if rank >= step]
                expect_equal(model.module.weight.grad, torch.full((1, 2), sum(left) / len(left)))

    def compiled_ddp(self):
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        alone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        model = DistributedDataParallel(copy.deepcopy(alone))
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):  # the second pass broadcasts buffers, in the midst of compiled code
            for net in (compiled, alone):
                net(part(0, 12).view(3, 4)).sum().backward()

        for mine, reference in zip(model.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, reference.grad)

    def ddp_with_sparse_gradients(self):
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        net = torch.nn.Embedding(6, 3, sparse=True)
        model = DistributedDataParallel(net)
        model(torch.tensor([self.rank, self.rank, 5])).sum().backward()
        expected = torch.zeros(6, 3)
        for rank in self.ranks:
            expected[rank] += 2
            expected[5] += 1

        torch.testing.assert_close(net.weight.grad.to_dense(), expected / self.world)

    def fsdp2(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
        alone, mesh = copy.deepcopy(net), init_device_mesh("cpu", (self.world,))
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh)

        optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (net, alone)]
        batches = [part(rank, 10).view(2, 5) / 10 for rank in self.ranks]
        for _ in range(2):
            net(batches[self.rank]).square().mean().backward()
            (sum(alone(batch).square().mean() for batch in batches) / self.world).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        for mine, reference in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), reference)

        half = fully_shard(torch.nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        half(torch.ones(2, 4)).sum().backward()

    def collectives_inside_backward(self):
        class Summed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x

            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                dist.all_reduce(grad)
                return grad

        x = part(0).requires_grad_()
        (Summed.apply(x) * part(self.rank)).sum().backward()
        expect_equal(x.grad, total(self.ranks))
        y = part(0).requires_grad_()
        swapped = fc.all_to_all_single_autograd(y[: self.world], None, None, dist.group.WORLD)
        (swapped * (1 + self.rank)).sum().backward()
        expect_equal(y.grad[: self.world], torch.arange(1.0, 1 + self.world))
        y.grad = None
        y.register_hook(lambda grad: fc.all_reduce(grad, "sum", dist.group.WORLD) + 0)
        (y * part(self.rank)).sum().backward()
        expect_equal(y.grad, total(self.ranks))
