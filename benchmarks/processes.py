"""Ranks that are processes: collectives beside Gloo, and the four steps beside a queue, a socket and a memcpy."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter

import torch

import dtorch_core
from benchmarks.cells import OPERATIONS, Buffers, Cell, call, check, size
from benchmarks.crew import Crew, CrewSubject, Timed, answer
from benchmarks.exchange import KIB, MIB, QUEUE, Queues
from benchmarks.gloo import gloo_crew, gloo_subject
from benchmarks.groups import DTORCH
from benchmarks.team import PATIENCE, timed
from benchmarks.timing import Series, Subject, interleave

RANKS = 2
SIZES = (KIB, 64 * MIB)

STEPS, PUBLISH = "four steps", "src_set"
SOCKET, MEMCPY = "socket", "memcpy"
EMPTY = "of empty()"
"""The tensor lies in shared memory already."""


def named(what: str, nbytes: int) -> str:
    """What a subject is called."""
    return f"{what}, {size(nbytes)}"


# Collectives


def collectives(rounds: int, operations: Sequence[str], progress: Callable[[str], None]) -> dict[Cell, Series]:
    """Two process ranks, ours and Gloo's."""
    results: dict[Cell, Series] = {}
    with closing(Crew(RANKS, _serve_group)) as ours, closing(gloo_crew(RANKS)) as gloo:
        for cell in _cells(operations):
            progress(f"{cell.operation}, {size(cell.nbytes)}, processes")
            results[cell] = interleave([CrewSubject.of(DTORCH, ours, cell), gloo_subject(gloo, cell)], rounds)

    return results


def _cells(operations: Sequence[str]) -> Iterator[Cell]:
    for operation in (one for one in OPERATIONS if one in operations):
        for nbytes in (0,) if operation == "barrier" else (KIB, MIB, 64 * MIB):
            yield Cell(operation, nbytes, RANKS, "cpu")


def _serve_group(rank: int, ranks: int, meeting: str, pipe: Connection) -> None:
    group = dtorch_core.open_group("bench", rank=rank, world_size=ranks, device="cpu", rendezvous=f"file://{meeting}")

    def prepare(cell: Cell) -> Timed:
        buffers, inputs = Buffers.of(cell, rank), [Buffers.of(cell, other).given for other in range(ranks)]
        act = call(cell, group.process_group, buffers)
        act()
        check(cell, rank, buffers, inputs)
        return partial(timed, act)

    answer(pipe, prepare)
    group.close()


# The exchange


def exchange(rounds: int, progress: Callable[[str], None]) -> Series:
    """All subjects of both sizes in one series: their names have the size."""
    progress("exchange, processes")
    with ExitStack() as stack:
        crew = stack.enter_context(closing(Crew(RANKS, _serve_store)))
        subjects: list[Subject] = [
            CrewSubject.of(named(what, nbytes), crew, what, nbytes)
            for what, nbytes in (
                *((SOCKET, KIB), (STEPS, KIB), (PUBLISH, KIB)),
                *((MEMCPY, 64 * MIB), (STEPS, 64 * MIB), (PUBLISH, 64 * MIB)),
                *((f"{STEPS} {EMPTY}", 64 * MIB), (f"{PUBLISH} {EMPTY}", 64 * MIB)),
            )
        ]
        for nbytes in SIZES:
            queues = Queues(torch.empty(nbytes // 4).fill_(1))
            stack.callback(queues.close)
            subjects.append(_Named(named(QUEUE, nbytes), queues))

        return interleave(subjects, rounds)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    subject: Subject

    def time(self, count: int) -> float:
        return self.subject.time(count)


def _serve_store(rank: int, ranks: int, meeting: str, pipe: Connection) -> None:
    with ExitStack() as stack:
        path = f"{meeting}.socket"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        if rank == 0:
            listener.bind(path)
            listener.listen()

        # Once the store is open, both are there.
        store = dtorch_core.open_store("bench", rank=rank, world_size=ranks, rendezvous=f"file://{meeting}")
        stack.callback(store.close)
        line = stack.enter_context(socket.socket(socket.AF_UNIX))
        if rank == 0:
            line = stack.enter_context(listener.accept()[0])
            os.unlink(path)
        else:
            line.connect(path)

        answer(pipe, _Sides(rank, store, line).prepare)


class _Sides:
    """What each of the two ranks does."""

    def __init__(self, rank: int, store: dtorch_core.TensorStore, line: socket.socket) -> None:
        self._rank, self._store, self._line = rank, store, line
        line.settimeout(PATIENCE)

    def prepare(self, what: str, nbytes: int) -> Timed:
        if what == SOCKET:
            return partial(timed, partial(self._ask if self._rank == 0 else self._answer, bytes(nbytes)))

        if what == MEMCPY:
            source, target = (torch.empty(nbytes // 4).fill_(value) for value in (1, 2))
            return partial(timed, partial(target.copy_, source) if self._rank == 0 else lambda: None)

        if self._rank == 1:
            read = partial(timed, self._read)
            # Only rank 0 publishes: the time that counts is its own.
            return (lambda count: 0 * read(count)) if what.startswith(PUBLISH) else read

        shape = (nbytes // 4,)
        tensor = self._store.empty(shape, dtype=torch.float32) if EMPTY in what else torch.empty(shape)
        tensor.fill_(1)
        if what.startswith(PUBLISH):
            return partial(self._time_of_publishing, tensor)

        return partial(timed, partial(self._publish, tensor))

    def _publish(self, tensor: torch.Tensor) -> float:
        begin = perf_counter()
        self._store.src_set("tensor", tensor, 1)
        published = perf_counter()
        self._store.src_wait_until_get_finished("tensor")
        return published - begin

    def _time_of_publishing(self, tensor: torch.Tensor, count: int) -> float:
        self._publish(tensor)  # as timed() does
        return sum(self._publish(tensor) for _ in range(count)) / count

    def _read(self) -> None:
        self._store.dest_get("tensor")
        self._store.dest_finish_get("tensor")

    def _ask(self, data: bytes) -> None:
        self._line.sendall(data)
        self._line.recv(1)

    def _answer(self, data: bytes) -> None:
        self._line.recv(len(data), socket.MSG_WAITALL)
        self._line.sendall(b".")
