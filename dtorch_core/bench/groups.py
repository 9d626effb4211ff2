"""Process groups of thread ranks: ours, and the one that torch has for its tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import dtorch_core
from dtorch_core.bench.cells import Buffers, Cell, call, check, checked, end
from dtorch_core.bench.team import Team

DTORCH = "dtorch, threads"
THREADED = "MultiThreadedPG"


class Ours:
    """The ThreadGroups that dtorch opens for a team, and their process groups."""

    name = DTORCH

    def __init__(self, team: Team, device: str) -> None:
        self._groups = team.run(
            lambda rank: dtorch_core.open_group("bench", rank=rank, world_size=team.size, device=device)
        )
        self.members = [group.process_group for group in self._groups]

    def close(self) -> None:
        for group in self._groups:
            group.close()


class Threaded:
    """torch.testing's MultiThreadedPG, known to torch.distributed under a name, as it asks for."""

    name = THREADED

    def __init__(self, team: Team) -> None:
        from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

        self.members: Sequence[dist.ProcessGroup] = team.run(lambda rank: ProcessLocalGroup(rank, team.size))
        for member in self.members:
            c10d._world.pg_names[member] = f"{THREADED} of {team.size}"  # type: ignore[assignment]  # a GroupName

    def close(self) -> None:
        for member in self.members:
            del c10d._world.pg_names[member]


class ThreadSubject:
    """One collective of one of these."""

    def __init__(self, group: Ours | Threaded, team: Team, cell: Cell, buffers: Sequence[Buffers]) -> None:
        self.name = group.name
        self._team = team
        self._calls = [call(cell, group.members[rank], buffers[rank]) for rank in range(team.size)]
        self._end = end(cell.device)
        self._check(group, cell)

    def _check(self, group: Ours | Threaded, cell: Cell) -> None:
        cell = checked(cell)
        fresh = [Buffers.of(cell, rank) for rank in range(self._team.size)]
        inputs = [buffers.given.clone() for buffers in fresh]
        self._team.run(lambda rank: call(cell, group.members[rank], fresh[rank])())
        for rank, buffers in enumerate(fresh):
            check(cell, rank, buffers, inputs)

    def time(self, count: int) -> float:
        return self._team.time(self._calls, count, self._end)
