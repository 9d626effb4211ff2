"""Gloo between processes of this machine, measured by turns with the thread ranks of the parent."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cells import Buffers, Cell
from benchmarks.team import PATIENCE, pin, timed

GLOO = "Gloo"


class Gloo:
    """The processes of one world. They sleep while others are measured."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "meeting")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, *question: object) -> list[float]:
        """Every rank's answer."""
        for pipe in self._pipes:
            pipe.send(question)

        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"Gloo, rank {rank}: no answer to {question}")

            answers.append(pipe.recv())

        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(("end",))

        for process in self._processes:
            process.join(PATIENCE)

        self._folder.cleanup()


class GlooSubject:
    """One collective of Gloo."""

    name = GLOO

    def __init__(self, gloo: Gloo, cell: Cell) -> None:
        self._gloo = gloo
        gloo.ask("prepare", cell)

    def time(self, count: int) -> float:
        return max(self._gloo.ask("time", count))


def _serve(rank: int, ranks: int, meeting: str, pipe: Connection) -> None:
    pin(rank)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks)
    call: Callable[[], object] = dist.barrier
    while (question := pipe.recv())[0] != "end":
        if question[0] == "prepare":
            call = _call(question[1], Buffers.of(question[1], rank))
            pipe.send(0.0)
        else:
            pipe.send(timed(call, question[1]))

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
