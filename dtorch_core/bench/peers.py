"""torch.distributed's own backends between processes of this machine, measured by turns with other ranks.

Gloo's ranks share the device that is measured. NCCL refuses ranks that share a GPU, so rank r has GPU r there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from dtorch_core.bench.cells import Buffers, Cell
from dtorch_core.bench.crew import Crew, Timed, answer
from dtorch_core.bench.team import timed

GLOO, NCCL = "Gloo", "NCCL"


def gloo_crew(ranks: int) -> Crew:
    """Processes that know Gloo's collectives."""
    return Crew(ranks, _serve, GLOO)


def nccl_crew(ranks: int) -> Crew:
    """Processes that know NCCL's, each with a GPU of its own."""
    return Crew(ranks, _serve, NCCL)


def why_no_nccl(ranks: int) -> str | None:
    """Why NCCL can't be measured here; None if it can."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL"

    gpus = torch.cuda.device_count()
    return None if gpus >= ranks else f"{ranks} ranks need a GPU each, and there are {gpus}"


def _serve(rank: int, ranks: int, meeting: str, pipe: Connection, name: str) -> None:
    store = dist.FileStore(meeting, ranks)
    if name == NCCL:
        own = torch.device("cuda", rank)
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=own)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)

    def prepare(cell: Cell) -> Timed:
        if name == NCCL:
            cell = replace(cell, device=f"cuda:{rank}")

        return partial(timed, _call(cell, Buffers.of(cell, rank)))

    answer(pipe, prepare)
    dist.destroy_process_group()


def _call(cell: Cell, buffers: Buffers) -> Callable[[], object]:
    collective = _collective(cell, buffers)
    if cell.device == "cpu":
        return collective

    def call_and_wait() -> None:
        collective()
        torch.cuda.synchronize(torch.device(cell.device))

    return call_and_wait


def _collective(cell: Cell, buffers: Buffers) -> Callable[[], object]:
    given, taken = buffers.given, buffers.taken
    if cell.operation == "all_reduce":
        return lambda: dist.all_reduce(given)

    if cell.operation == "all_gather":
        outputs = list(taken.chunk(cell.ranks))
        return lambda: dist.all_gather(outputs, given)

    if cell.operation == "reduce_scatter":
        # Its name since torch 2.13; the older one warns there.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: reduce_scatter(taken, given)

    if cell.operation == "all_to_all":
        return lambda: dist.all_to_all_single(taken, given)

    if cell.operation == "broadcast":
        return lambda: dist.broadcast(given, 0)

    return dist.barrier
