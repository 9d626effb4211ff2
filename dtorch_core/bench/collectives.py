"""Collectives of thread ranks and of process ranks beside their peers and the floors, measured by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

from dtorch_core._text import count
from dtorch_core.bench.cells import OPERATIONS, Buffers, Cell
from dtorch_core.bench.crew import Crew, CrewSubject, RefusedError
from dtorch_core.bench.floors import FLOOR, HAND_OFF, Floor, HandOff
from dtorch_core.bench.groups import DTORCH, THREADED, Ours, Threaded, ThreadSubject
from dtorch_core.bench.peers import GLOO, NCCL, gloo_crew, nccl_crew, why_no_nccl
from dtorch_core.bench.processes import SOCKET, group_crew
from dtorch_core.bench.sizes import MIB, room, size
from dtorch_core.bench.team import Team
from dtorch_core.bench.timing import Series, Subject, interleave

PROCESSES = "dtorch, processes"

_LIMITS = {DTORCH: HAND_OFF, THREADED: HAND_OFF, PROCESSES: SOCKET, GLOO: SOCKET}
"""What ranks that are threads, and ranks that are processes, need at least to hear of each other."""

LARGE = 64 * MIB
"""On a GPU, calls of as many bytes are measured twice: each waited for, and queued."""

PROCESS = 160 * MIB
"""What a process takes that has loaded torch, about, beside what it shares with others."""

NO_BYTES = (HAND_OFF, SOCKET)
"""Subjects that take as long whatever the size: they have no bandwidth."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    device: str = "cpu"
    ranks: Sequence[int] = (2,)
    rounds: int = 5
    ranks_as: Sequence[str] = ("threads", "processes")
    gloo: bool = True
    operations: Sequence[str] = OPERATIONS
    sizes: Sequence[int] = ()
    skipped: list[str] = field(default_factory=list)
    """What was asked for and is not measured, and why; told while it is measured."""

    def cells(self, ranks: int) -> Iterator[Cell]:
        """The lines of the table for one world."""
        for operation in self.operations:
            for nbytes in (0,) if operation == "barrier" else self.sizes:
                yield Cell(operation, nbytes, ranks, self.device)
                if self.device != "cpu" and nbytes >= LARGE:
                    yield Cell(operation, nbytes, ranks, self.device, queued=True)


def limits(name: str, series: Series) -> list[str]:
    """The subjects that a subject can't be faster than, whichever of them takes longer; none where nothing is known.

    The floor moves the same bytes; a hand-off, or a round trip through a socket, is how one rank hears of another.
    """
    return [limit for limit in (FLOOR, _LIMITS[name]) if limit in series] if name in _LIMITS else []


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[Cell, Series]:
    """Measure every cell of the plan for which there is memory."""
    results: dict[Cell, Series] = {}
    for ranks in plan.ranks:
        with ExitStack() as stack:
            world = _World(plan, ranks, stack)
            for cell in plan.cells(ranks):
                if world.is_empty:
                    break

                need, free = cell.held * world.copies, room(cell.device)
                if need > free:
                    plan.skipped.append(f"{cell}: needs {size(need)} of memory, and {size(free)} are free")
                else:
                    progress(str(cell))
                    results[cell] = world.measure(cell, plan.rounds)

    return results


class _World:
    """All subjects with so many ranks."""

    def __init__(self, plan: Plan, ranks: int, stack: ExitStack) -> None:
        self._device, self._skipped = plan.device, plan.skipped
        self._threads = "threads" in plan.ranks_as
        self._team = stack.enter_context(closing(Team(ranks)))
        self._groups: list[Ours | Threaded] = []
        if self._threads:
            self._groups.append(stack.enter_context(closing(Ours(self._team, plan.device))))
            self._groups.append(stack.enter_context(closing(Threaded(self._team))))

        self._crews: dict[str, Crew] = {}
        self._room = room("cpu")
        if "processes" in plan.ranks_as:
            self._start(stack, PROCESSES, partial(group_crew, ranks, plan.device))

        if plan.gloo:
            self._start(stack, GLOO, partial(gloo_crew, ranks))

        if plan.device != "cpu":
            why = why_no_nccl(ranks)
            if why is None:
                self._start(stack, NCCL, partial(nccl_crew, ranks))
            else:
                plan.skipped.append(f"{NCCL}, {count(ranks, 'rank')}: {why}")

    def _start(self, stack: ExitStack, name: str, crew: Callable[[], Crew]) -> None:
        """Start processes if there is memory for them beside those that are there."""
        ranks = self._team.size
        need, free = ranks * PROCESS, self._room - len(self._crews) * ranks * PROCESS
        if need > free:
            self._skipped.append(
                f"{name}, {count(ranks, 'rank')}: the processes need about {size(need)} of memory, and "
                f"{size(max(0, free))} are free"
            )
        else:
            self._crews[name] = stack.enter_context(closing(crew()))

    @property
    def is_empty(self) -> bool:
        """There is nobody to measure."""
        return not self._groups and not self._crews

    @property
    def copies(self) -> int:
        """How often the tensors of a cell are there at once. Gloo has copies of its own, and so has a GPU's floor."""
        floor = 0 if self._device == "cpu" else 2
        return 1 + floor + sum(2 if name == GLOO else 1 for name in self._crews)

    def measure(self, cell: Cell, rounds: int) -> Series:
        """One line of the table."""
        team = self._team
        buffers = [Buffers.of(cell, rank) for rank in range(team.size)]
        subjects: list[Subject] = [ThreadSubject(group, team, cell, buffers) for group in self._groups]
        for name, crew in self._crews.items():
            if cell.queued and name != PROCESSES:
                continue

            if name == PROCESSES:
                subjects.append(CrewSubject.of(name, crew, cell))
                continue

            try:
                peer = CrewSubject.of(name, crew, cell)
                peer.time(1)
            except RefusedError as error:  # a peer that can't do it is no reason to stop
                self._skipped.append(f"{name}, {cell}: {error}")
            else:
                subjects.append(peer)

        if cell.nbytes:
            subjects.append(Floor(team, cell, buffers))

        if self._threads and team.size > 1:
            subjects.append(HandOff(team))

        if PROCESSES in self._crews and team.size > 1:
            subjects.append(CrewSubject.of(SOCKET, self._crews[PROCESSES], SOCKET))

        return interleave(subjects, rounds)
