"""Ranks of a samedevice group that are threads, and what they exchange."""

import torch
from torch.distributed import distributed_c10d as c10d

from dtorch_core.testing import run_ranks

LIMIT = 20.0
LARGE = 1_200_001


def on_ranks(body, world_size=2, timeout=LIMIT):
    """``body(process_group, group)`` on every rank."""

    def rank(ctx):
        with ctx.open_group("own", backend="samedevice", timeout=timeout) as group:
            return body(group.process_group, group)

    return run_ranks(rank, world_size, 2 * LIMIT)


def part(rank, *shape, dtype=torch.float32):
    """Values that differ by position and rank."""
    return torch.arange(torch.Size(shape).numel()).add(1000 * (rank + 1)).to(dtype).reshape(shape)


def options(name, **values):
    made = getattr(c10d, name)()
    for key, value in values.items():
        setattr(made, key, value)

    return made
