"""Gloo between processes of this machine, measured by turns with other ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.cells import Buffers, Cell
from benchmarks.crew import Crew, CrewSubject, Timed, answer
from benchmarks.team import timed

GLOO = "Gloo"


def gloo_crew(ranks: int) -> Crew:
    """Processes that know Gloo's collectives."""
    return Crew(ranks, _serve)


def gloo_subject(crew: Crew, cell: Cell) -> CrewSubject:
    """One collective of Gloo."""
    return CrewSubject.of(GLOO, crew, cell)


def _serve(rank: int, ranks: int, meeting: str, pipe: Connection) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks)

    def prepare(cell: Cell) -> Timed:
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
