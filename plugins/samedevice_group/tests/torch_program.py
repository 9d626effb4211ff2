"""A program of torch.distributed that names its backend, and is otherwise like any other. Each rank is a process.

    python torch_program.py BACKEND RANK WORLD_SIZE RENDEZVOUS PARTS

Runs the checks that PARTS names, and prints a JSON object: what each raised; an empty text is none. The ranks go on
after a check that failed, so that one run tells of all of them.
"""

import contextlib
import copy
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta

import dtorch_samedevice_group  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed import distributed_c10d as c10d

LIMIT = timedelta(seconds=20)
CPU = torch.device("cpu")

all_gather_single = getattr(fc, "all_gather_single", None) or fc.all_gather_tensor  # the older name


def part(rank, size=4):
    """Values that differ by position and rank."""
    return torch.arange(float(size)) + 10 * (rank + 1)


def total(ranks, size=4):
    return sum(part(rank, size) for rank in ranks)


def expect_equal(found, expected):
    assert torch.equal(found, expected), f"{found} instead of {expected}"


class Checks:
    """Each method is one check, and is called on every rank."""

    def __init__(self, backend):
        self.backend = backend
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ranks = range(self.world)

    def who_we_are(self):
        group = dist.group.WORLD
        assert dist.get_backend() == self.backend and group.name() == "samedevice"
        assert (group.rank(), group.size()) == (self.rank, self.world)
        assert dist.get_process_group_ranks(group) == list(self.ranks)
        assert c10d._get_object_coll_device(group) == "cpu" and c10d._device_capability(group)[0] == "cpu"
        assert c10d._get_pg_config(group)["backend_config"] == f"cpu:{self.backend},cuda:{self.backend}"

    def collectives(self):
        x = part(self.rank)
        dist.all_reduce(x)
        expect_equal(x, total(self.ranks))
        outputs = [torch.empty(4) for _ in self.ranks]
        dist.all_gather(outputs, part(self.rank))
        expect_equal(torch.cat(outputs), torch.cat([part(rank) for rank in self.ranks]))
        if hasattr(dist, "gather_single"):  # since torch 2.14
            whole = torch.empty(4 * self.world) if self.rank == 1 else None
            dist.gather_single(part(self.rank), whole, 1)
            assert whole is None or torch.equal(whole, torch.cat(outputs))

        work = dist.broadcast(x := part(self.rank), 1, async_op=True)
        assert work.get_future().then(lambda future: future.value()[0]).wait() is x or work.is_completed()
        expect_equal(x, part(1))
        dist.barrier()

    def barrier_ends_what_was_begun_before(self):
        for meet in (
            dist.barrier,
            lambda: dist.barrier(async_op=True).wait(),
            lambda: dist.group.WORLD.barrier().get_future().wait(),
        ):
            xs = [torch.full((100, 100), float(number)) for number in range(50)]  # too many bytes for a message
            for x in xs:
                dist.all_reduce(x, async_op=True)

            meet()
            for number, x in enumerate(xs):
                expect_equal(x, torch.full_like(x, number * self.world))

    def objects(self):
        if importlib.util.find_spec("numpy") is None:
            return  # torch itself needs it here

        found = [None] * self.world
        dist.all_gather_object(found, {"rank": self.rank})
        assert [one["rank"] for one in found] == list(self.ranks)
        told = ["from 1", self.rank] if self.rank == 1 else [None, None]
        dist.broadcast_object_list(told, 1)
        assert told == ["from 1", 1]
        mine = [None]
        dist.scatter_object_list(mine, [("for", rank) for rank in self.ranks] if self.rank == 0 else None, 0)
        assert mine == [("for", self.rank)]
        gathered = [None] * self.world if self.rank == 1 else None
        dist.gather_object(self.rank, gathered, 1)
        assert gathered in (None, list(self.ranks))

    def monitored_barrier(self):
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=LIMIT, wait_all_ranks=True)
        group = dist.new_group()
        if self.rank == self.world - 1:
            dist.barrier()  # it comes too late for the other one
            return

        try:
            dist.monitored_barrier(group, timedelta(seconds=0.3))
        except RuntimeError as error:
            expected = f"Rank {self.world - 1} failed" if self.rank == 0 else f"Rank {self.rank} successfully reached"
            assert isinstance(error, TimeoutError) and expected in str(error), error
        else:
            raise AssertionError("a rank had not come")

        dist.barrier()

    def set_timeout(self):
        group = dist.new_group()
        set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # its name up to torch 2.13
        set_timeout(timedelta(seconds=0.3), group)
        if self.rank == 0:
            started = time.monotonic()
            try:
                dist.all_reduce(part(0), group=group)
            except TimeoutError as error:
                assert "rank 1" in str(error) and time.monotonic() - started < 5, error
            else:
                raise AssertionError("nobody else had come")

        dist.barrier()

    def batch_isend_irecv(self):
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        x = torch.empty(4)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, x, before), dist.P2POp(dist.isend, part(self.rank), after)]
        )
        for work in works:
            work.wait()

        expect_equal(x, part(before))

    def coalescing(self):
        for device in (None, CPU):
            for async_ops in (False, True):
                xs = [part(self.rank, size) for size in (3, 5)]
                with self._coalesced(device, async_ops):
                    for x in xs:
                        dist.all_reduce(x)

                expect_equal(xs[1], total(self.ranks, 5))
                whole = torch.empty(4 * self.world)
                with self._coalesced(device, async_ops):
                    dist.all_gather_into_tensor(whole, part(self.rank))

                expect_equal(whole, torch.cat([part(rank) for rank in self.ranks]))
                mine = torch.empty(2)
                with self._coalesced(device, async_ops):
                    dist.reduce_scatter_tensor(mine, part(self.rank, 2 * self.world))

                expect_equal(mine, total(self.ranks, 2 * self.world)[2 * self.rank : 2 * self.rank + 2])

        x, before = torch.empty(4), (self.rank - 1) % self.world
        with self._coalesced(CPU, True):
            dist.irecv(x, before)
            dist.isend(part(self.rank), (self.rank + 1) % self.world)

        expect_equal(x, part(before))

    @contextlib.contextmanager
    def _coalesced(self, device, async_ops):
        with c10d._coalescing_manager(device=device, async_ops=async_ops) as manager:
            yield

        if async_ops:
            manager.wait()

    def groups(self):
        """Destroyed in another order on every other rank."""
        halves = [dist.new_group(list(self.ranks)[half::2]) for half in (0, 1)]
        mine, whole = halves[self.rank % 2], dist.new_group()
        x = part(self.rank)
        dist.all_reduce(x, group=mine)
        expect_equal(x, total(self.ranks[self.rank % 2 :: 2]))
        dist.all_reduce(x := part(self.rank), group=whole)
        expect_equal(x, total(self.ranks))
        for group in (mine, whole) if self.rank % 2 else (whole, mine):
            dist.destroy_process_group(group)

        # torch 2.14 counts them in the names of later groups: so every rank has one.
        first = self.rank // 2 * 2
        local = dist.new_group([first, first + 1], use_local_synchronization=True)
        dist.all_reduce(x := part(self.rank), group=local)
        expect_equal(x, total((first, first + 1)))

    def split_group(self):
        for _ in range(2):
            group = dist.split_group(split_ranks=[[0, 1]])
            if self.rank > 1:
                assert group in (None, dist.GroupMember.NON_GROUP_MEMBER)  # torch 2.13, 2.14
                continue

            assert (group.rank(), group.size(), dist.get_backend(group)) == (self.rank, 2, self.backend)
            dist.all_reduce(x := part(self.rank), group=group)
            expect_equal(x, total((0, 1)))
            alone = dist.split_group(group, [[0], [1]])
            dist.all_reduce(x := part(self.rank), group=alone)
            expect_equal(x, part(self.rank))
            dist.destroy_process_group(group if self.rank else alone)

        for wrong in ([], [[]], [[0], [0, 1]], [[self.world]]):
            try:
                dist.split_group(split_ranks=wrong)
            except ValueError:
                continue

            raise AssertionError(f"{wrong} was taken")

    def functional_collectives(self):
        whole = torch.cat([part(rank) for rank in self.ranks])
        for group in (dist.group.WORLD, dist.group.WORLD.group_name):
            expect_equal(fc.all_reduce(part(self.rank), "sum", group) + 0, total(self.ranks))
            expect_equal(all_gather_single(part(self.rank), 0, group) + 0, whole)
            swapped = fc.all_to_all_single(part(self.rank, self.world), None, None, group) + 0
            expect_equal(swapped, torch.stack([part(rank, self.world)[self.rank] for rank in self.ranks]))
            expect_equal(fc.broadcast(part(self.rank), 1, group) + 0, part(1))

        name, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
        many = ops.all_reduce_coalesced([part(self.rank), part(0, 3)], "max", name)
        expect_equal(fc.wait_tensor(many[0]), part(self.world - 1))
        mine = fc.wait_tensor(
            ops.reduce_scatter_tensor(
                part(self.rank, 2 * self.world), "sum", self.world, name
            )
        )
        expect_equal(mine, total(self.ranks, 2 * self.world)[2 * self.rank : 2 * self.rank + 2])

    def operators_that_torch_serves_in_cpp(self):
        name = dist.group.WORLD.group_name
        ops = torch.ops._c10d_functional
        out = torch.empty(4 * self.world)
        ops.wait_tensor(ops.all_gather_into_tensor_out(part(self.rank), self.world, name, out=out))
        expect_equal(out, torch.cat([part(rank) for rank in self.ranks]))
        if hasattr(ops, "batch_p2p_ops"):
            after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
            x = torch.empty(4)
            results = ops.batch_p2p_ops(["irecv", "isend"], [before, after], [0, 0], [x, part(self.rank)], name)
            for result in results:
                ops.wait_tensor(result)

            expect_equal(x, part(before))

        importlib.import_module("torch.distributed.tensor")  # has the operator
        x = torch.stack([part(self.rank, 3) + 100 * row for row in self.ranks])
        swapped = torch.ops._dtensor.shard_dim_alltoall(x, 1, 0, name)
        expect_equal(swapped, torch.cat([part(rank, 3) + 100 * self.rank for rank in self.ranks])[None])

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

    def groups_in_several_threads(self):
        groups, errors = [dist.new_group() for _ in range(3)], []

        def use(number, group):
            try:
                for turn in range(30):
                    x = part(self.rank) + 100 * number + turn
                    dist.all_reduce(x, group=group)
                    expect_equal(x, total(self.ranks) + (100 * number + turn) * self.world)
                    whole = all_gather_single(part(self.rank) + number, 0, group) + 0
                    expect_equal(whole, torch.cat([part(rank) + number for rank in self.ranks]))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=one, daemon=True) for one in enumerate(groups)]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join(LIMIT.total_seconds())
            assert not thread.is_alive()

        if errors:
            raise errors[0]

    def mismatch_is_told(self):
        group = dist.new_group()
        try:
            dist.all_reduce(part(0, 3 + self.rank), group=group)
        except RuntimeError as error:
            assert "rank 0: all_reduce(float32[3], sum)" in str(error), error
        else:
            raise AssertionError("the ranks called different things")

        dist.all_reduce(x := part(self.rank), group=group)
        expect_equal(x, total(self.ranks))

    def destroyed_and_begun_again(self):
        dist.new_group([0])
        dist.destroy_process_group()
        begin(*sys.argv[1:5])
        dist.all_reduce(x := part(self.rank))
        expect_equal(x, total(self.ranks))

    def a_rank_that_dies(self):
        """The last rank is killed in the middle. The others are told at once, and can destroy what they have."""
        group, victim = dist.new_group(), self.world - 1
        works = [dist.all_reduce(part(self.rank), group=one, async_op=True) for one in (group, None)]
        for work in works:
            work.wait()

        if self.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

        started = time.monotonic()
        for one in (group, None):
            try:
                dist.all_reduce(part(self.rank), group=one)
            except RuntimeError as error:
                assert isinstance(error, ConnectionError) and f"rank {victim} (pid " in str(error), error
            else:
                raise AssertionError(f"rank {victim} is dead")

        dist.destroy_process_group(group)
        dist.destroy_process_group()
        assert time.monotonic() - started < 5


def begin(backend, rank, world_size, rendezvous):
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world_size), timeout=LIMIT
    )


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin(*sys.argv[1:5])
    checks, raised = Checks(sys.argv[1]), {}
    for name in sys.argv[5].split(","):
        try:
            getattr(checks, name)()
            raised[name] = ""
        except Exception:
            raised[name] = f"rank {checks.rank}:\n{traceback.format_exc()}"

    print(json.dumps(raised), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
