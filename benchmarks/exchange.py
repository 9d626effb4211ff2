"""The four steps of a TensorStore between two threads, beside bare hand-offs and torch.multiprocessing's queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue

import torch
from torch import Tensor

import dtorch_core
from benchmarks.cells import size
from benchmarks.floors import HandOff
from benchmarks.team import PATIENCE, Team, pin, timed
from benchmarks.timing import Series, interleave

KIB, MIB = 2**10, 2**20
SIZES = (KIB, 64 * MIB)
CROWD = 100

QUEUE = "torch.multiprocessing"


@dataclass(frozen=True, slots=True)
class FourSteps:
    """Rank 0 publishes and waits until it is read; rank 1 gets, and finishes."""

    team: Team
    stores: Sequence[dtorch_core.TensorStore]
    tensor: Tensor
    waiting: int = 0
    """Other threads of rank 1 that wait for keys of their own meanwhile."""

    @property
    def name(self) -> str:
        return f"four steps, {self.waiting} waiting" if self.waiting else "four steps"

    def time(self, count: int) -> float:
        producer, consumer = self.stores

        def publish() -> None:
            producer.src_set("tensor", self.tensor, 1)
            producer.src_wait_until_get_finished("tensor")

        def read() -> None:
            consumer.dest_get("tensor")
            consumer.dest_finish_get("tensor")

        with ExitStack() as stack:
            if self.waiting:
                stack.callback(_crowd(producer, consumer, self.waiting))

            return self.team.time([publish, read], count)


def _crowd(producer: dtorch_core.TensorStore, consumer: dtorch_core.TensorStore, size: int) -> Callable[[], None]:
    """Start threads that each wait for a key; the result lets them go."""
    keys = [f"of thread {number}" for number in range(size)]
    threads = [threading.Thread(target=consumer.dest_get_to_device, args=(key, "cpu"), daemon=True) for key in keys]
    for thread in threads:
        thread.start()

    def release() -> None:
        for key in keys:
            producer.src_set(key, torch.zeros(1), 1)

        for key in keys:
            producer.src_wait_until_get_finished(key, timeout=PATIENCE)

        for thread in threads:
            thread.join(PATIENCE)

    return release


class Queues:
    """Another process that answers each tensor it gets from a queue."""

    name = QUEUE

    def __init__(self, tensor: Tensor) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._tensor = tensor
        self._there, self._back = context.SimpleQueue(), context.SimpleQueue()
        self._process = context.Process(target=_answer, args=(self._there, self._back), daemon=True)
        self._process.start()

    def time(self, count: int) -> float:
        return timed(self._call, count)

    def _call(self) -> None:
        self._there.put(self._tensor.clone())
        self._back.get()

    def close(self) -> None:
        self._there.put(None)
        self._process.join(PATIENCE)


def _answer(there: SimpleQueue[Tensor | None], back: SimpleQueue[int]) -> None:
    pin(1)
    while there.get() is not None:
        back.put(0)


def measure(rounds: int, progress: Callable[[str], None]) -> dict[int, Series]:
    """One series for each size."""
    results = {}
    with ExitStack() as stack:
        team = Team(2)
        stack.callback(team.close)
        stores = team.run(lambda rank: dtorch_core.open_store("bench", rank=rank, world_size=2))
        for store in stores:
            stack.callback(store.close)

        for nbytes in SIZES:
            progress(f"exchange, {size(nbytes)}")
            tensor = torch.empty(nbytes // 4).fill_(1)
            subject = partial(FourSteps, team, stores, tensor)
            queues = Queues(tensor)
            stack.callback(queues.close)
            results[nbytes] = interleave([subject(), HandOff(team), subject(CROWD), queues], rounds)

    return results
