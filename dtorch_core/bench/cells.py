"""The collectives that are measured: their tensors, and how a c10d process group is called for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from dtorch_core._text import count
from dtorch_core.bench.sizes import MIB, size
from dtorch_core.bench.team import nothing

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
CHECKED = 64 * MIB
"""The values of larger calls are not looked at, but those of one of this size: to check takes as much memory again."""

MOST_RANKS = 128
"""Sums of so many ranks' values are exact, so that they can be checked."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    operation: str
    nbytes: int
    """Bytes of each rank's input; 0 for the barrier."""
    ranks: int
    device: str
    queued: bool = False
    """On a GPU: calls are queued one behind the other, and the device is waited for once, after the last."""

    @property
    def small(self) -> bool:
        """Its cost is that of the hand-offs, not of the bytes."""
        return self.nbytes <= 4096

    @property
    def held(self) -> int:
        """Bytes of all ranks' tensors."""
        return 4 * self.ranks * (self.given + self.taken)

    @property
    def given(self) -> int:
        """Elements of each rank's input: as many for every rank."""
        return self.nbytes // 4 // self.ranks * self.ranks

    @property
    def taken(self) -> int:
        """Elements of what each rank writes beside its input."""
        of = {"all_gather": self.ranks * self.given, "all_to_all": self.given}
        of["reduce_scatter"] = self.given // self.ranks
        return of.get(self.operation, 0)

    @property
    def moved(self) -> int:
        """Bytes that have to be read and written at least: each input once, each output once."""
        whole = 4 * self.given
        read = whole if self.operation == "broadcast" else self.ranks * whole
        written = {
            "all_reduce": self.ranks * whole,
            "all_gather": self.ranks * self.ranks * whole,
            "reduce_scatter": whole,
            "all_to_all": self.ranks * whole,
            "broadcast": (self.ranks - 1) * whole,
        }
        return read + written.get(self.operation, 0)

    def __str__(self) -> str:
        return ", ".join([self.operation, *([self.words] if self.nbytes else []), count(self.ranks, "rank")])

    @property
    def words(self) -> str:
        """Its size, and how it is called."""
        return f"{size(self.nbytes)}, queued" if self.queued else size(self.nbytes)


@dataclass(frozen=True, slots=True)
class Buffers:
    """One rank's tensors, in memory that is mapped already."""

    given: Tensor
    taken: Tensor
    """What the operation writes, if not ``given``."""

    @classmethod
    def of(cls, cell: Cell, rank: int) -> Buffers:
        given = torch.arange(cell.given, dtype=torch.float32, device=cell.device)
        given.remainder_(1000).add_(1000 * rank)
        taken = torch.empty(cell.taken, dtype=torch.float32, device=cell.device).fill_(-1)
        return cls(given, taken)


def call(cell: Cell, group: dist.ProcessGroup, buffers: Buffers) -> Callable[[], object]:
    """One collective on a process group, waited for; on the device too, where calls are not queued."""
    begin = _begin(cell, group, buffers)
    if cell.device == "cpu":
        return lambda: begin().wait()

    waited = nothing if cell.queued else end(cell.device)

    def call_and_wait() -> None:
        work = begin()
        if work is not None:  # NCCL has nothing to wait for where a call is on the current stream
            work.wait()

        waited()

    return call_and_wait


def end(device: str) -> Callable[[], None]:
    """What makes sure that all calls before it are over."""
    if device == "cpu":
        return nothing

    return partial(torch.cuda.synchronize, torch.device(device))


def _begin(cell: Cell, group: dist.ProcessGroup, buffers: Buffers) -> Callable[[], Any]:
    given, taken = buffers.given, buffers.taken
    if cell.operation == "all_reduce":
        return lambda: group.allreduce([given], _blocking(c10d.AllreduceOptions))

    if cell.operation == "all_gather":
        outputs = list(taken.chunk(cell.ranks))
        return lambda: group.allgather([outputs], [given], _blocking(c10d.AllgatherOptions))

    if cell.operation == "reduce_scatter":
        parts = list(given.chunk(cell.ranks))
        return lambda: group.reduce_scatter([taken], [parts], _blocking(c10d.ReduceScatterOptions))

    if cell.operation == "all_to_all":
        parts, outputs = list(given.chunk(cell.ranks)), list(taken.chunk(cell.ranks))
        return lambda: group.alltoall(outputs, parts, _blocking(c10d.AllToAllOptions))

    if cell.operation == "broadcast":
        return lambda: group.broadcast([given], _blocking(c10d.BroadcastOptions))

    return lambda: group.barrier(_blocking(c10d.BarrierOptions))


def _blocking(kind: Callable[[], Any]) -> Any:  # noqa: ANN401 - c10d's option classes share no base
    """Options as torch.distributed makes them for a call that it waits for at once."""
    options = kind()
    options.asyncOp = False
    return options


def checked(cell: Cell) -> Cell:
    """The call that is checked instead of measured."""
    return replace(cell, nbytes=min(cell.nbytes, CHECKED), queued=False)


def check(cell: Cell, rank: int, buffers: Buffers, inputs: Sequence[Tensor]) -> None:
    """A call on these inputs gave the right values: what is measured is the collective, not its absence.

    :raises AssertionError: if not.
    """
    parts = [given.chunk(cell.ranks)[rank] for given in inputs] if cell.nbytes else list(inputs)
    found, wanted = {
        "all_reduce": lambda: (buffers.given, sum(inputs[1:], inputs[0])),
        "all_gather": lambda: (buffers.taken, torch.cat(list(inputs))),
        "reduce_scatter": lambda: (buffers.taken, sum(parts[1:], parts[0])),
        "all_to_all": lambda: (buffers.taken, torch.cat(parts)),
        "broadcast": lambda: (buffers.given, inputs[0]),
        "barrier": lambda: (buffers.given, inputs[rank]),
    }[cell.operation]()
    if not torch.equal(found, wanted):
        raise AssertionError(f"{cell}: rank {rank} has wrong values")
