"""What rank processes of dtorch do: collectives, the four steps, and the limits of processes: a socket, a memcpy."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter

import torch

import dtorch_core
from dtorch_core.bench.cells import Buffers, Cell, call, check, checked, end
from dtorch_core.bench.crew import Crew, Timed, answer
from dtorch_core.bench.sizes import KIB
from dtorch_core.bench.team import PATIENCE, timed

STEPS, PUBLISH = "four steps", "src_set"
SOCKET, MEMCPY = "socket", "memcpy"
EMPTY = "of empty()"
"""The tensor lies in shared memory already."""

Ends = tuple[socket.socket, socket.socket]
"""Of the socket: rank 0's, and rank 1's."""


def group_crew(ranks: int, device: str) -> Crew:
    """Ranks of a group on one device; they time a :class:`Cell`, or the socket."""
    with _ends() as ends:
        return Crew(ranks, _serve_group, device, ends)


def store_crew() -> Crew:
    """Two ranks of a store; they time one of the words above, with so many bytes."""
    with _ends() as ends:
        return Crew(2, _serve_store, ends)


def _serve_group(rank: int, ranks: int, meeting: str, pipe: Connection, device: str, ends: Ends) -> None:
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))

    where = f"file://{meeting}"
    with closing(
        dtorch_core.open_group("bench", rank=rank, world_size=ranks, device=device, rendezvous=where)
    ) as group:

        def prepare(what: Cell | str) -> Timed:
            if isinstance(what, str):
                return partial(timed, _round_trip(rank, ends))

            small = checked(what)
            buffers, inputs = Buffers.of(small, rank), [Buffers.of(small, other).given for other in range(ranks)]
            call(small, group.process_group, buffers)()
            check(small, rank, buffers, inputs)
            del buffers, inputs
            return partial(timed, call(what, group.process_group, Buffers.of(what, rank)), end=end(what.device))

        answer(pipe, prepare)


def _serve_store(rank: int, ranks: int, meeting: str, pipe: Connection, ends: Ends) -> None:
    where = f"file://{meeting}"
    with closing(dtorch_core.open_store("bench", rank=rank, world_size=ranks, rendezvous=where)) as store:
        answer(pipe, _Sides(rank, store, _round_trip(rank, ends)).prepare)


@contextmanager
def _ends() -> Iterator[Ends]:
    """A UNIX socket between rank 0 and rank 1. The processes have it once they are started."""
    ends = socket.socketpair()
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def _round_trip(rank: int, ends: Ends) -> Callable[[], object]:
    """What a rank does so that 1 KiB goes from rank 0 to rank 1, and a byte back."""
    for owner, other in enumerate(ends):
        if owner != rank:
            other.close()  # so that it ends with its owner's process

    if rank > 1:
        return lambda: None

    end = ends[rank]
    end.settimeout(PATIENCE)

    def ask() -> None:
        end.sendall(bytes(KIB))
        end.recv(1)

    def respond() -> None:
        end.recv(KIB, socket.MSG_WAITALL)
        end.sendall(b".")

    return respond if rank else ask


class _Sides:
    """What each of the two ranks of a store does."""

    def __init__(self, rank: int, store: dtorch_core.TensorStore, round_trip: Callable[[], object]) -> None:
        self._rank, self._store, self._round_trip = rank, store, round_trip

    def prepare(self, what: str, nbytes: int) -> Timed:
        if what == SOCKET:
            return partial(timed, self._round_trip)

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
