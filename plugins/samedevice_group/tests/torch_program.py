"""A program of torch.distributed that names its backend, and is otherwise like any other. Each rank is a process.

    python torch_program.py BACKEND RANK WORLD_SIZE RENDEZVOUS PARTS

Runs the checks that PARTS names, and prints a JSON object: what each raised; an empty text is none. The ranks go on
after a check that failed, so that one run tells of all of them.
"""

import contextlib
import importlib
import importlib.util
import json
import sys
import traceback
import warnings

import dtorch_samedevice_group  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed import distributed_c10d as c10d
from torch_checks import all_gather_single, begin, expect_equal, part, total
from torch_group_checks import GroupChecks
from torch_training_checks import TrainingChecks

CPU = torch.device("cpu")


class Checks(GroupChecks, TrainingChecks):
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
