"""What ranks do in the tests, as a program: its ranks are processes. On the CPU torch's Gloo takes NCCL's place.

nccl_ranks.py CASE DEVICE...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from dtorch_nccl_group import group as factory
from dtorch_nccl_group.environment import Environment
from dtorch_nccl_group.torch_nccl import WITHOUT_RECORDER, recorder_takes_one_rank

import dtorch_core
from dtorch_core import BackendSpec, PeerLostError, RankFailedError, StoreTimeoutError, Support, hookimpl, spawn
from dtorch_core.testing import run_ranks

LIMIT = 60.0
GLOO_LIMIT = 20.0
"""The same for ranks that are threads, over Gloo."""
GLOO_BRIEF = 4.0
"""Of a group in which a call may stay begun for ever. When Gloo is collected it waits for the end of that, in any later
test, and with the GIL."""


_environment = Environment({})


def made(store, rank, world_size, timeout, name, *, shared):
    def make():
        return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))

    return _environment.made(make, WITHOUT_RECORDER if shared and recorder_takes_one_rank() else None)


def gloo(*, queued=False):
    """What stands where :mod:`dtorch_nccl_group.torch_nccl` does.

    :param queued: as NCCL, calls count as over only when somebody has looked.
    """
    return SimpleNamespace(
        DEVICE_TYPE="cpu",
        KIND=dist.ProcessGroup.BackendType.GLOO,
        QUEUED=queued,
        backend=made,
        connect=lambda backend, device, timeout: None,
        limit=lambda backend, timeout: None,
        finish=lambda device: None,
    )


class Plugin:
    @hookimpl
    def dtorch_register_thread_groups(self):
        words = frozenset("cpu uneven p2p self_send split async".split())
        path = "dtorch_nccl_group.group:open_process_group"
        return [BackendSpec("gloo", path, lambda topology: Support.yes(1, "for tests"), capabilities=words)]


@contextmanager
def over_gloo(*, queued=False):
    """With it, groups of threads can be opened over "gloo", which takes NCCL's place."""
    before, factory.nccl = factory.nccl, gloo(queued=queued)
    dtorch_core.register(Plugin(), name="nccl over gloo")
    try:
        yield
    finally:
        dtorch_core.unregister("nccl over gloo")
        factory.nccl = before


def on_threads(body, world_size, timeout):
    """``body(group)`` on every rank, under :func:`over_gloo`; the results by rank."""

    def rank(ctx):
        with ctx.open_group(backend="gloo", timeout=timeout) as group:
            return body(group)

    return run_ranks(rank, world_size, 2 * GLOO_LIMIT)


def use_gloo():
    factory.nccl = gloo()
    dtorch_core.register(Plugin(), name="nccl over gloo")


def opened(ctx, timeout=LIMIT):
    if ctx.device == "cpu":
        use_gloo()

    return ctx.open_group(backend="gloo" if ctx.device == "cpu" else "nccl", timeout=timeout)


def part(rank, device, *shape):
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device)
    return numbers.add(1000 * (rank + 1)).reshape(shape)


def values(ctx):
    """Collectives, uneven shards and messages."""
    n = ctx.world_size
    with opened(ctx) as group:
        xs = [part(rank, ctx.device, 4 + rank, 3) for rank in range(n)]
        evens = [part(rank, ctx.device, 4, 6) for rank in range(n)]
        x, even = xs[ctx.rank], evens[ctx.rank]
        total = sum(evens)
        assert torch.equal(group.all_reduce(even), total)
        assert torch.equal(group.all_gather(x), torch.cat(xs))
        assert torch.equal(group.reduce_scatter(even), total.chunk(n)[ctx.rank])
        assert all(map(torch.equal, group.all_gather_list(x), xs))
        gathered = group.gather(x, n - 1)
        assert gathered is None if ctx.rank < n - 1 else all(map(torch.equal, gathered, xs))
        group.barrier()
        group.send(x, (ctx.rank + 1) % n)
        assert torch.equal(group.recv((ctx.rank - 1) % n), xs[ctx.rank - 1])
        group.send(even, ctx.rank)
        assert torch.equal(group.recv(ctx.rank), even)

    return "right"


def kit(ctx):
    """Every collective of the kit, on shapes of all kinds, and every reduction that is defined."""
    from dtorch_core.reduction import rule
    from dtorch_core.testing import _group_base as base
    from dtorch_core.testing import _group_reductions as reductions

    n = ctx.world_size
    with opened(ctx) as group:
        for shape in [(n,), (2 * n, 3, n), (n, 0, 2 * n), (7,), (5, 3), (0,), (2, 1, 1, 9)]:
            xs = [base.coded(rank, shape, ctx.device) for rank in range(n)]
            for collective in base.COLLECTIVES:
                got, wanted = collective.call(group, xs[ctx.rank]), collective.wanted(xs, ctx.rank)
                assert base.same(got, wanted), f"{collective} of {shape}"
                got = collective.call(group, xs[ctx.rank], async_op=True).result()
                assert base.same(got, wanted), f"{collective} of {shape}, in the background"

        for dtype in (*reductions.WIDTHS, *reductions.FLOATS, *reductions.COMPLEX, torch.bool):
            xs = [reductions.input_of(rank, dtype) for rank in range(n)]
            for op in reductions.ARITHMETIC:
                try:
                    rule(op, dtype)
                except TypeError:
                    continue

                got = group.all_reduce(xs[ctx.rank].to(ctx.device), op).cpu()
                torch.testing.assert_close(got, reductions.reduced(op, xs), equal_nan=True, msg=f"{op} of {dtype}")

    return "right"


def killed(ctx):
    """The last rank is killed inside a collective; the others name it, at once."""
    with opened(ctx) as group:
        group.all_reduce(part(ctx.rank, ctx.device, 4))
        group.barrier()  # until all have begun it: on a GPU it may have returned already
        if ctx.rank == ctx.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

        begun = time.monotonic()
        try:
            group.all_reduce(part(ctx.rank, ctx.device, 4))
            group.barrier()
        except PeerLostError as error:
            print(f"after {time.monotonic() - begun:.1f} s: {error}", flush=True)
            raise


def late(ctx):
    """The last rank does not come; the others name it, and show who called what."""
    with opened(ctx) as group:
        group.all_reduce(part(ctx.rank, ctx.device, 4))
        if ctx.rank == ctx.world_size - 1:
            time.sleep(1.5)
            return "late"

        try:
            group.barrier(timeout=0.5)
        except StoreTimeoutError as error:
            return str(error)

    return "nothing was said"


def raises(ctx):
    """The last rank raises out of the group while the others have results under way."""
    with opened(ctx) as group:
        group.all_reduce(part(ctx.rank, ctx.device, 4))
        if ctx.rank == ctx.world_size - 1:
            raise ZeroDivisionError("on purpose")

        group.barrier()


def in_torch(ctx):
    """What programs of torch.distributed do with their default process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    assert dist.get_backend() == "dtorch"
    x = part(ctx.rank, ctx.device, 4)
    dist.all_reduce(x)
    assert torch.equal(x, part(0, ctx.device, 4) + part(1, ctx.device, 4))
    sub = dist.new_group([0, 1])
    dist.barrier(group=sub)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": ctx.rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    got, peer = torch.zeros(4, device=ctx.device), 1 - ctx.rank
    ops = [dist.P2POp(dist.isend, part(ctx.rank, ctx.device, 4), peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()

    assert torch.equal(got, part(peer, ctx.device, 4))
    inner = dist.split_group(dist.group.WORLD, [[0, 1]])
    dist.broadcast(x, 0, group=inner)
    dist.destroy_process_group(sub)
    assert torch.cuda.current_device() == torch.device(ctx.device).index
    mesh = init_device_mesh("cuda", (2,))
    dense = torch.arange(24.0, device=ctx.device).reshape(4, 6)
    for target in ([Shard(1)], [Replicate()], [Shard(0)]):
        moved = distribute_tensor(dense, mesh, [Shard(0)]).redistribute(mesh, target)
        assert torch.equal(moved.full_tensor(), dense)

    return "right"


if __name__ == "__main__":
    case, *devices = sys.argv[1:]
    run = partial(spawn, ranks_as="processes", devices=devices, timeout=2 * LIMIT, torch_distributed=case == "in_torch")
    try:
        for told in run(globals()[case], len(devices)):
            print(told)
    except RankFailedError as error:
        print(error)
