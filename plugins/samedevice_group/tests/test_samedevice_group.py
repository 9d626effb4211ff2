"""The samedevice group: the contract of every group, and torch's own functions with its process group."""

import inspect
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core.testing import ThreadGroupTests

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import LIMIT, on_ranks, part


class TestSameDeviceGroupConforms(ThreadGroupTests):
    backend = "samedevice"
    thorough = True


def newest(module, *names):
    """The function under the newest of its names that this torch has; the older ones warn."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


class TestTorchDistributed:
    """torch's own functions, which take a group that no default group knows."""

    def test_functions_with_a_group(self):
        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            x = part(rank, 3)
            dist.all_reduce(x, group=pg)
            assert torch.equal(x, part(0, 3) + part(1, 3))
            work = dist.all_reduce(x, dist.ReduceOp.MAX, group=pg, async_op=True)
            assert work.wait(timedelta(seconds=LIMIT))
            x = part(rank, 3)
            dist.broadcast(x, group_src=1, group=pg)
            assert torch.equal(x, part(1, 3))
            x = part(rank, 3)
            dist.reduce(x, group_dst=1, group=pg)
            assert torch.equal(x, part(0, 3) + part(1, 3) if rank == 1 else part(0, 3))
            outs = [torch.zeros(3) for _ in range(n)]
            dist.all_gather(outs, part(rank, 3), group=pg)
            assert torch.equal(outs[1], part(1, 3))
            out = torch.zeros(6)
            newest(dist, "all_gather_single", "all_gather_into_tensor")(out, part(rank, 3), group=pg)
            assert torch.equal(out, torch.cat([part(0, 3), part(1, 3)]))
            out = torch.zeros(3)
            newest(dist, "reduce_scatter_single", "reduce_scatter_tensor")(out, part(rank, 6), group=pg)
            assert torch.equal(out, (part(0, 6) + part(1, 6))[3 * rank :][:3])
            out = torch.zeros(3)
            dist.reduce_scatter(out, list(part(rank, 6).split(3)), group=pg)
            assert torch.equal(out, (part(0, 6) + part(1, 6))[3 * rank :][:3])
            out = torch.zeros(6)
            dist.all_to_all_single(out, part(rank, 6), group=pg)
            assert torch.equal(out, torch.cat([part(0, 6)[3 * rank :][:3], part(1, 6)[3 * rank :][:3]]))
            outs = [torch.zeros(3), torch.zeros(3)]
            dist.all_to_all(outs, list(part(rank, 6).split(3)), group=pg)
            assert torch.equal(outs[0], part(0, 6)[3 * rank :][:3])
            outs = [torch.zeros(3), torch.zeros(3)] if rank == 1 else None
            dist.gather(part(rank, 3), outs, group_dst=1, group=pg)
            assert rank == 0 or torch.equal(outs[0], part(0, 3))
            out = torch.zeros(3)
            dist.scatter(out, [part(0, 3), part(1, 3)] if rank == 1 else None, group_src=1, group=pg)
            assert torch.equal(out, part(rank, 3))
            if rank == 0:
                dist.isend(part(0, 3), group_dst=1, group=pg, tag=3).wait()
            else:
                dist.irecv(out, group_src=0, group=pg, tag=3).wait()
                assert torch.equal(out, part(0, 3))

            dist.barrier(group=pg)

        on_ranks(body)

    def test_functional_collectives_find_the_group_by_name(self):
        """C++ calls the Python methods, and waits for their Works."""
        from torch.distributed import _functional_collectives as functional

        register = torch._C._distributed_c10d._register_process_group
        unregister = torch._C._distributed_c10d._unregister_process_group
        torch._C._distributed_c10d._set_thread_isolation_mode(True)

        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            register("functional", pg)
            try:
                got = functional.all_reduce(part(rank, 3), "sum", "functional")
                assert torch.equal(got + 0, sum(part(r, 3) for r in range(n)))
                gather = newest(functional, "all_gather_single", "all_gather_tensor")
                got = gather(part(rank, 3), 0, "functional")
                assert torch.equal(got + 0, torch.cat([part(r, 3) for r in range(n)]))
                scatter = newest(functional, "reduce_scatter_single", "reduce_scatter_tensor")
                got = scatter(part(rank, 3 * n), "avg", 0, "functional")
                assert torch.equal(got + 0, (sum(part(r, 3 * n) for r in range(n)) / n)[3 * rank :][:3])
                got = functional.all_to_all_single(part(rank, n), None, None, "functional")
                assert torch.equal(got + 0, torch.stack([part(r, n)[rank] for r in range(n)]))
                got = functional.broadcast(part(rank, 3), 1, "functional")
                assert torch.equal(got + 0, part(1, 3))
                many = functional.all_reduce_coalesced([part(rank, 3), part(rank, 2)], "max", "functional")
                for m, size in zip(many, (3, 2), strict=True):
                    assert torch.equal(m + 0, part(n - 1, size))

                gather = newest(functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
                many = gather([part(rank, 3), part(rank, 2)], "functional")
                for m, size in zip(many, (3, 2), strict=True):
                    assert torch.equal(m + 0, torch.cat([part(r, size) for r in range(n)]))

            finally:
                unregister("functional")

        try:
            on_ranks(body, 3)
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)

    def test_group_says_who_it_is(self):
        def body(pg, group):
            assert (pg.rank(), pg.size()) == (group.rank, 3)
            assert (pg.getRank(), pg.getSize()) == (group.rank, 3)
            assert pg.getBackendName() == "samedevice"
            assert pg.group_name == pg.getGroupName() == "own"
            pg.setGroupName("another")
            pg.setGroupDesc("what it is for")
            assert (pg.group_name, pg.group_desc) == ("another", "what it is for")
            assert isinstance(pg, dist.ProcessGroup)

        on_ranks(body, 3)

    def test_every_public_method_of_the_surface_is_there(self):
        from dtorch_samedevice_group.group import SameDeviceProcessGroup

        names = (
            "allreduce allreduce_coalesced reduce broadcast allgather allgather_coalesced all_gather_single "
            "_allgather_base all_gather_single_coalesced allgather_into_tensor_coalesced reduce_scatter "
            "reduce_scatter_single _reduce_scatter_base reduce_scatter_single_coalesced "
            "reduce_scatter_tensor_coalesced alltoall all_to_all_single alltoall_base gather scatter barrier send recv "
            "recv_anysource abort shutdown set_timeout"
        )
        for name in names.split():
            own = inspect.getattr_static(SameDeviceProcessGroup, name)  # not torch's, which raises
            assert inspect.isfunction(own), name
