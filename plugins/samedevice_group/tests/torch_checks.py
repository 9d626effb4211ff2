"""What the checks of ``torch_program.py`` have in common."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

LIMIT = timedelta(seconds=20)

all_gather_single = getattr(fc, "all_gather_single", None) or fc.all_gather_tensor  # the older name


def part(rank, size=4):
    """Values that differ by position and rank."""
    return torch.arange(float(size)) + 10 * (rank + 1)


def total(ranks, size=4):
    return sum(part(rank, size) for rank in ranks)


def expect_equal(found, expected):
    assert torch.equal(found, expected), f"{found} instead of {expected}"


def begin(backend, rank, world_size, rendezvous):
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world_size), timeout=LIMIT
    )
