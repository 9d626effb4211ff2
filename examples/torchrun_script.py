"""A script as one writes it for torchrun. It knows nothing of dtorch.

    torchrun --nproc-per-node 4 examples/torchrun_script.py          one process, and with NCCL one GPU, for each rank
    dtorch run --nproc 4 examples/torchrun_script.py                 all ranks on one device
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.1)
        self.net2 = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.dropout(self.relu(self.net1(x))))


def setup() -> torch.device:
    if torch.cuda.is_available():
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        dist.init_process_group(backend="nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group(backend="gloo")

    return device


def train(args: argparse.Namespace) -> None:
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size} on {device}")

    torch.manual_seed(args.seed + rank)  # dropout is each rank's own; DDP makes the weights those of rank 0
    model = DDP(ToyModel().to(device), device_ids=[device.index] if device.type == "cuda" else None)
    generator = torch.Generator().manual_seed(args.seed)
    inputs = torch.randn(256, 10, generator=generator)
    data = TensorDataset(inputs, inputs @ torch.randn(10, 5, generator=generator))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()

        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / world_size:.4f}")

    checksums = [torch.zeros(1, device=device) for _ in range(world_size)]
    dist.all_gather(checksums, sum(p.detach().sum() for p in model.parameters()).reshape(1))
    assert all(torch.equal(checksum, checksums[0]) for checksum in checksums)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="train a toy model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
