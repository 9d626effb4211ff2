"""DDP on four ranks that are threads of this process and share one device.

    python examples/train_ddp.py [--device cuda] [--ranks 4]

``DistributedDataParallel`` keeps the whole model on each rank, and averages the gradients while backward runs. The
program is torch's: nothing in ``rank`` knows that the ranks are threads. Ends with exit code 1 if the loss curve is not
that of one rank.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training.model import compared, make, train

from dtorch_core import RankContext, spawn


def rank(ctx: RankContext) -> list[float]:
    """Train, as one of the ranks."""
    model = DistributedDataParallel(make().to(ctx.device))
    return train(model, dist.get_rank(), dist.get_world_size(), ctx.device, mean)


def mean(loss: Tensor) -> Tensor:
    """Of all ranks' losses."""
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss


def main(arguments: list[str] | None = None) -> int:
    """Train on the ranks, and on one."""
    parser = argparse.ArgumentParser(description="DDP on ranks that share one device")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args(arguments)
    losses = spawn(rank, options.ranks, devices=options.device, torch_distributed=True, rng="per-rank")
    alone = train(make().to(options.device), 0, 1, options.device, lambda loss: loss)
    return compared(f"DDP on {options.ranks} ranks", losses[0], alone)


if __name__ == "__main__":
    raise SystemExit(main())
