"""A script for torchrun, with a GPU for each rank: nccl_script.py BACKEND."""

import os
import sys

import dtorch_samedevice_group  # noqa: F401 - registers the backend "dtorch"
import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group(sys.argv[1], device_id=device if sys.argv[1] == "nccl" else None)
x = torch.arange(6.0, device=device) + 10 * rank
dist.all_reduce(x)
assert torch.equal(x, sum(torch.arange(6.0, device=device) + 10 * each for each in range(world_size)))
parts = [torch.empty(2, device=device) for _ in range(world_size)]
dist.all_gather(parts, torch.full((2,), float(rank), device=device))
assert [part.tolist() for part in parts] == [[float(each)] * 2 for each in range(world_size)]
group = dist.new_group(list(range(world_size)))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).to(device), device_ids=[device])
model(torch.ones(3, 4, device=device) * (rank + 1)).sum().backward()
grads = [torch.empty_like(model.module.weight.grad) for _ in range(world_size)]
dist.all_gather(grads, model.module.weight.grad, group=group)
assert all(torch.equal(grad, grads[0]) for grad in grads)
dist.barrier(device_ids=[device.index])
dist.destroy_process_group()
sys.stdout.write(f"rank {rank} of {world_size}: right\n")  # at once: all ranks have one pipe
