"""Rank threads that stay: each is pinned to a core, and runs what the main thread gives to all of them at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from time import perf_counter
from typing import Any, TypeVar

import torch

from dtorch_core.bench.interrupts import after_this

T = TypeVar("T")
Job = tuple[Callable[[int], Any], Future[Any]]
Call = Callable[[], object]

PATIENCE = 300.0
"""Seconds that a job may take. A rank that failed leaves the others in a collective: the run ends then."""


def nothing() -> None:
    """Calls are over when they return."""


def pin(rank: int) -> None:
    """Bind the calling thread to core ``rank % cores``, with no intra-op threads beside it."""
    cores = sorted(os.sched_getaffinity(os.getpid()))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


class Team:
    """The thread ranks of one world."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(size)]
        for rank, queue in enumerate(self._queues):
            threading.Thread(target=_serve, args=(rank, queue), name=f"rank {rank}", daemon=True).start()

    def run(self, job: Callable[[int], T]) -> list[T]:
        """``job(rank)`` on every rank at once; the results by rank."""
        futures: list[Future[T]] = [Future() for _ in self._queues]
        with after_this():
            for queue, future in zip(self._queues, futures, strict=True):
                queue.put((job, future))

            return [future.result(PATIENCE) for future in futures]

    def time(self, calls: Sequence[Call], count: int, end: Call = nothing) -> float:
        """Seconds for one call of each rank's ``calls[rank]``, made ``count`` times in a row: the slowest rank's."""
        return max(self.run(lambda rank: timed(calls[rank], count, end)))

    def close(self) -> None:
        """Let the threads end."""
        for queue in self._queues:
            queue.put(None)


def timed(call: Call, count: int, end: Call = nothing) -> float:
    """Seconds for one of ``count`` calls in a row; one more, before them, brings the ranks together.

    :param end: makes sure that all of them are over.
    """
    call()
    end()
    begin = perf_counter()
    for _ in range(count):
        call()

    end()
    return (perf_counter() - begin) / count


def _serve(rank: int, queue: SimpleQueue[Job | None]) -> None:
    pin(rank)
    while (item := queue.get()) is not None:
        job, future = item
        try:
            future.set_result(job(rank))
        except BaseException as error:
            future.set_exception(error)

        del item, job, future  # tensors of the last job would live until the next one
