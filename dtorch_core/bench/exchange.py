"""The four steps of a TensorStore, between threads and between processes, beside a queue and the limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue

import torch
from torch import Tensor

import dtorch_core
from dtorch_core._spawn.started_process import no_interrupt
from dtorch_core.bench.collectives import Plan
from dtorch_core.bench.crew import Crew, CrewSubject
from dtorch_core.bench.floors import HAND_OFF, HandOff
from dtorch_core.bench.processes import EMPTY, MEMCPY, PUBLISH, SOCKET, STEPS, store_crew
from dtorch_core.bench.sizes import KIB, room, size
from dtorch_core.bench.team import PATIENCE, Team, pin, timed
from dtorch_core.bench.timing import Series, Subject, interleave
from dtorch_core.errors import PeerLostError

CROWD = 100
COPIES = 6
"""How often the tensor is there at once, about."""

OF_THREADS = f"{STEPS}, threads"
CROWDED = f"{OF_THREADS}, {CROWD} waiting"
OF_PROCESSES = f"{STEPS}, processes"
OF_EMPTY = f"{OF_PROCESSES}, {EMPTY}"
PUBLISHED, PUBLISHED_EMPTY = f"{PUBLISH}, processes", f"{PUBLISH}, processes, {EMPTY}"
PUBLISHED_SMALL = f"{PUBLISH}, processes, always 1 KiB"
"""Beside those of every size: what is compared to it is measured by turns with it."""
QUEUE = "torch.multiprocessing"

_BY_CREW = {
    OF_PROCESSES: STEPS,
    OF_EMPTY: f"{STEPS} {EMPTY}",
    PUBLISHED: PUBLISH,
    PUBLISHED_EMPTY: f"{PUBLISH} {EMPTY}",
    SOCKET: SOCKET,
    MEMCPY: MEMCPY,
}
_LIMITS = {
    OF_THREADS: (HAND_OFF,),
    CROWDED: (HAND_OFF,),
    OF_PROCESSES: (SOCKET, MEMCPY),
    OF_EMPTY: (SOCKET,),
    PUBLISHED: (MEMCPY,),
    QUEUE: (SOCKET, MEMCPY),
}


def limits(name: str, series: Series) -> list[str]:
    """The subjects that a subject can't be faster than, whichever of them takes longer; none where nothing is known."""
    return [limit for limit in _LIMITS.get(name, ()) if limit in series]


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
        return CROWDED if self.waiting else OF_THREADS

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

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._there = context.SimpleQueue()
        self._back, theirs = context.Pipe(duplex=False)  # a queue would not tell that nobody is left to answer
        self._process = context.Process(target=_answer, args=(self._there, theirs), daemon=True)
        with no_interrupt():
            self._process.start()

        theirs.close()

    def call(self, tensor: Tensor) -> None:
        """A clone there, and an answer back.

        :raises PeerLostError: if the process has ended.
        """
        self._there.put(tensor.clone())
        try:
            self._back.recv()
        except EOFError as error:
            raise PeerLostError(f"the process at the other end of the queue (pid {self._process.pid}) ended") from error

    def close(self) -> None:
        self._there.put(None)
        self._process.join(PATIENCE)


@dataclass(frozen=True, slots=True)
class QueueSubject:
    """One tensor through the queue."""

    queues: Queues
    tensor: Tensor
    name: str = QUEUE

    def time(self, count: int) -> float:
        return timed(lambda: self.queues.call(self.tensor), count)


def _answer(there: SimpleQueue[Tensor | None], back: Connection) -> None:
    pin(1)
    while there.get() is not None:
        back.send(0)


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[int, Series]:
    """One series for each size of a tensor on the CPU, between two ranks."""
    results: dict[int, Series] = {}
    with ExitStack() as stack:
        team = stack.enter_context(closing(Team(2)))
        stores: Sequence[dtorch_core.TensorStore] = ()
        if "threads" in plan.ranks_as:
            stores = team.run(lambda rank: dtorch_core.open_store("bench", rank=rank, world_size=2))
            for store in stores:
                stack.callback(store.close)

        crew = stack.enter_context(closing(store_crew())) if "processes" in plan.ranks_as else None
        queues = stack.enter_context(closing(Queues()))
        for nbytes in plan.sizes:
            need, free = COPIES * nbytes, room("cpu")
            if need > free:
                plan.skipped.append(
                    f"exchange, {size(nbytes)}: needs {size(need)} of memory, and {size(free)} are free"
                )
                continue

            progress(f"exchange, {size(nbytes)}")
            tensor = torch.empty(nbytes // 4).fill_(1)
            subjects: list[Subject] = []
            if stores:
                # The limit comes right after what it limits: behind a crowd of threads it is faster by a third.
                subjects += [FourSteps(team, stores, tensor), HandOff(team), FourSteps(team, stores, tensor, CROWD)]

            if crew is not None:
                subjects += _between_processes(crew, nbytes)

            results[nbytes] = interleave([*subjects, QueueSubject(queues, tensor)], plan.rounds)

    return results


def _between_processes(crew: Crew, nbytes: int) -> list[Subject]:
    subjects: list[Subject] = [CrewSubject.of(name, crew, what, nbytes) for name, what in _BY_CREW.items()]
    return [*subjects, CrewSubject.of(PUBLISHED_SMALL, crew, PUBLISH, KIB)]
