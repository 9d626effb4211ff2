"""FSDP2 on four ranks that are threads of this process and share one device.

    python examples/train_fsdp2.py [--device cuda] [--ranks 4]

``fully_shard`` keeps a quarter of every parameter, of its gradient and of its optimizer state on each rank. The program
is torch's: nothing in ``rank`` knows that the ranks are threads. Ends with exit code 1 if the loss curve is not that of
one rank.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training.model import compared, make, train

from dtorch_core import RankContext, spawn


def rank(ctx: RankContext) -> list[float]:
    """Train, as one of the ranks."""
    mesh = init_device_mesh(torch.device(ctx.device).type, (dist.get_world_size(),))
    model = make().to(ctx.device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)

    fully_shard(model, mesh=mesh)
    return train(model, dist.get_rank(), dist.get_world_size(), ctx.device, mean)


def mean(loss: Tensor) -> Tensor:
    """Of all ranks' losses."""
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss


def main(arguments: list[str] | None = None) -> int:
    """Train on the ranks, and on one."""
    parser = argparse.ArgumentParser(description="FSDP2 on ranks that share one device")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args(arguments)
    losses = spawn(rank, options.ranks, devices=options.device, torch_distributed=True, rng="per-rank")
    alone = train(make().to(options.device), 0, 1, options.device, lambda loss: loss)
    return compared(f"FSDP2 on {options.ranks} ranks", losses[0], alone)


if __name__ == "__main__":
    raise SystemExit(main())
