"""Ranks of a samedevice group that are threads and share a GPU, and what they exchange there."""

import torch

from dtorch_core.testing import run_ranks

LIMIT = 30.0
LONG = 400_000_000
"""Clock cycles: about 200 ms."""

GPU = "cuda:0"


def on_ranks(body, world_size=2, own=True):
    """``body(process_group, group)`` on every rank, with a stream of the rank's own as the current one, or none."""

    def rank(ctx):
        with ctx.open_group("own", backend="samedevice", timeout=LIMIT) as group:
            with torch.cuda.stream(torch.cuda.Stream() if own else None):
                result = body(group.process_group, group)
                torch.cuda.current_stream().synchronize()
                return result

    return run_ranks(rank, world_size, 2 * LIMIT, devices=GPU)


def part(rank, *shape, dtype=torch.float32):
    """Values that differ by position and rank."""
    return torch.arange(torch.Size(shape).numel(), device=GPU).add(1000 * (rank + 1)).to(dtype).reshape(shape)


def warm(pg, *sizes):
    """Load the kernels and allocate the memory: either may wait for the device."""
    for size in sizes:
        x, n = part(pg.rank(), size), pg.size()
        pg.allreduce([x.clone()]).wait()
        pg.allgather([[torch.zeros_like(x) for _ in range(n)]], [x]).wait()
        x.clone().fill_(-1)

    torch.cuda._sleep(1)
    torch.cuda.current_stream().synchronize()
    pg.barrier().wait()


def busy():
    event = torch.cuda.Event()
    event.record()
    return not event.query()
