"""What the machine allows: bytes moved with no word between the threads, and threads that only wake each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dtorch_core.bench.cells import Buffers, Cell, end
from dtorch_core.bench.team import Team, nothing

HAND_OFF = "hand-off"
"""Two threads, two locks: wake the other one, be woken by it."""
FLOOR = "floor"
"""The least work that gives the collective's result, shared among the cores; on CUDA a copy of as many bytes."""

BLOCK = 256 * 1024 // 4
"""Elements. A block of every rank stays in cache."""

Step = Callable[[], object]


class HandOff:
    """There and back between two threads, each on its core."""

    name = HAND_OFF

    def __init__(self, team: Team) -> None:
        self._team = team

    def time(self, count: int) -> float:
        there, back = threading.Lock(), threading.Lock()
        there.acquire()
        back.acquire()

        def ask() -> None:
            there.release()
            back.acquire()

        def answer() -> None:
            there.acquire()
            back.release()

        return self._team.time([ask, answer, *[nothing] * (self._team.size - 2)], count)


class Floor:
    """The bytes of one collective."""

    name = FLOOR

    def __init__(self, team: Team, cell: Cell, buffers: Sequence[Buffers]) -> None:
        self._team = team
        if cell.device == "cpu":
            threads = min(len(os.sched_getaffinity(0)), cell.ranks)
            steps = _steps(cell, buffers, BLOCK)
            bounds = [len(steps) * part // threads for part in range(threads + 1)]
            shares = [steps[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
        else:
            # One kernel, which reads and writes as many bytes as a collective in one kernel would.
            source, target = (torch.ones(cell.moved // 8, device=cell.device) for _ in range(2))
            shares = [[partial(_copy, target, source), *([] if cell.queued else [end(cell.device)])]]

        self._calls: list[Step] = [partial(_run, share) for share in shares]
        self._calls += [nothing] * (cell.ranks - len(shares))
        self._end = end(cell.device)

    def time(self, count: int) -> float:
        return self._team.time(self._calls, count, self._end)


def _run(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


def _steps(cell: Cell, buffers: Sequence[Buffers], block: int) -> list[Step]:
    """The work in pieces that may run in any order, neighbours in memory next to each other."""
    given, taken = [one.given for one in buffers], [one.taken for one in buffers]
    if cell.operation == "all_reduce":
        return [partial(_add_and_copy, *blocks) for blocks in _blocks(given, block)]

    if cell.operation == "broadcast":
        return [partial(_copy, *pair) for target in given[1:] for pair in _blocks((target, given[0]), block)]

    inputs = [one.chunk(cell.ranks) for one in given]
    if cell.operation == "reduce_scatter":
        jobs = [(out, *(parts[rank] for parts in inputs)) for rank, out in enumerate(taken)]
        return [partial(_add, *blocks) for job in jobs for blocks in _blocks(job, block)]

    outputs = [one.chunk(cell.ranks) for one in taken]
    if cell.operation == "all_gather":
        pairs = [(part, source) for parts in outputs for part, source in zip(parts, given, strict=True)]
    else:
        pairs = [(outputs[to][by], inputs[by][to]) for to in range(cell.ranks) for by in range(cell.ranks)]

    return [partial(_copy, *blocks) for pair in pairs for blocks in _blocks(pair, block)]


def _blocks(tensors: Sequence[Tensor], block: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(block) for tensor in tensors), strict=True))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _add(out: Tensor, first: Tensor, *others: Tensor) -> None:
    if not others:  # of one rank
        out.copy_(first)
        return

    second, *more = others
    torch.add(first, second, out=out)
    for other in more:
        out.add_(other)


def _add_and_copy(first: Tensor, *others: Tensor) -> None:
    # Every input is read once and every output written once: the sum leaves the cache only on its way out.
    for other in others:
        first.add_(other)

    for other in others:
        other.copy_(first)
