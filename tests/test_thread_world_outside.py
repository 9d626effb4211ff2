"""Thread ranks with a torch.distributed of their own: what the rest of the process sees meanwhile and afterwards."""

import functools
import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtorch_core import RankFailedError, spawn

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from thread_world_ranks import LIMIT, rows, run


def state():
    """What the shim changes in torch and Python."""
    return {
        "world": distributed_c10d._world,
        "backend": distributed_c10d._backend,
        "names": [vars(distributed_c10d)[name] for name in vars(distributed_c10d) if "register" in name],
        "mesh": [vars(DeviceMesh)[name] for name in ("__init__", "__setstate__")],
        "rank": torch._C._distributed_c10d._set_global_rank,
        "ddp": nn.parallel.DistributedDataParallel._active_ddp_module,
        "thread": threading.Thread.start,
        "property": functools.cached_property.__get__,
        "hook": sys.excepthook,
        "tracker": type(sys.modules.get("torch.distributed.tensor._random")),
        "lock": getattr(
            getattr(sys.modules.get("torch.distributed.tensor._sharding_prop"), "ShardingPropagator", None),
            "_fake_mode_lock", None,
        ),
    }  # fmt: skip


class TestOutside:
    @pytest.fixture(autouse=True)
    def torch_is_as_before(self):
        import torch.distributed.tensor  # noqa: F401 - which the first mesh of a rank imports

        before = state()
        yield
        assert state() == before
        assert not dist.is_initialized()

    def test_torch_is_as_before_after_a_run(self):
        run(lambda ctx: init_device_mesh("cpu", (2,)).size(), 2)

    def test_torch_is_as_before_after_a_failure(self):
        def rank(ctx):
            init_device_mesh("cpu", (2, 2))
            if ctx.rank == 2:
                raise ValueError("no")

            dist.barrier()

        with pytest.raises(RankFailedError, match="rank 2 of 4 failed with ValueError: no"):
            run(rank)

    def test_torch_is_as_before_where_the_group_can_not_be_opened(self, monkeypatch):
        monkeypatch.setenv("DTORCH_THREAD_GROUP", "nonesuch")
        with pytest.raises(RankFailedError, match="nonesuch"):
            run(lambda ctx: None, 2)

    def test_ranks_without_their_own_see_the_process(self):
        assert spawn(lambda ctx: dist.is_initialized(), 2) == [False, False]

    def test_spawn_inside_of_a_rank_is_inside_of_its_world(self):
        def rank(ctx):
            plain = spawn(lambda inner: dist.get_rank(), 2)
            divided = spawn(lambda inner: dist.get_rank(), 2, torch_distributed=True)
            x = rows(ctx.rank)
            dist.all_reduce(x)
            return plain, divided, x

        for number, (plain, divided, x) in enumerate(run(rank, 2)):
            assert plain == [number, number] and divided == [0, 1]
            assert torch.equal(x, rows(0) + rows(1))

    def test_nothing_of_a_rank_is_kept(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        groups = []

        def rank(ctx):
            groups.append(weakref.ref(dist.group.WORLD))
            mesh = init_device_mesh("cpu", (2,))
            x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
            return (x @ x.T).redistribute(mesh, [Replicate()]).to_local().sum().item()

        for _ in range(3):
            run(rank, 2)

        gc.collect()
        assert sum(group() is not None for group in groups) <= 2  # those of the last run, at most

    def test_two_runs_at_once_are_apart(self):
        inside = threading.Barrier(4, timeout=LIMIT)

        def rank(ctx):
            inside.wait()
            x = rows(ctx.rank)
            dist.all_reduce(x)
            inside.wait()
            return x

        results = {}
        threads = [
            threading.Thread(target=lambda number=number: results.update({number: run(rank, 2)})) for number in range(2)
        ]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join(LIMIT)

        for number in range(2):
            assert all(torch.equal(x, rows(0) + rows(1)) for x in results[number])

    def test_the_process_keeps_its_own_groups_meanwhile(self):
        before = sys.excepthook, distributed_c10d._backend
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        hook = sys.excepthook
        came, seen = threading.Barrier(3, timeout=LIMIT), threading.Barrier(3, timeout=LIMIT)

        def rank(ctx):
            mesh = init_device_mesh("cpu", (2,))
            came.wait()
            seen.wait()  # the outer group is gone now
            return functional.all_reduce(rows(ctx.rank), "sum", mesh).wait()

        results = []
        ranks = threading.Thread(target=lambda: results.extend(run(rank, 2)))
        ranks.start()
        came.wait()
        try:
            assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
            assert dist.group.WORLD.group_name == "0" and sys.excepthook is hook
            assert torch.equal(functional.all_reduce(rows(3), "sum", "0").wait(), rows(3))
            mesh = init_device_mesh("cpu", (1,))
            # Of the group itself, or of a new one: where there is a GPU, torch gives a mesh over Gloo one for both.
            assert mesh._thread_id is None and dist.get_process_group_ranks(mesh.get_group()) == [0]
            assert torch.equal(functional.all_reduce(rows(4), "sum", mesh).wait(), rows(4))
        finally:
            dist.destroy_process_group()
            seen.wait()
            ranks.join(LIMIT)
            sys.excepthook, distributed_c10d._backend = before  # c10d leaves its own behind

        assert all(torch.equal(x, rows(0) + rows(1)) for x in results) and len(results) == 2
