"""Collectives of thread ranks beside MultiThreadedPG, Gloo and the floors: one table, measured by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from benchmarks.cells import OPERATIONS, Buffers, Cell, size
from benchmarks.floors import Floor, HandOff
from benchmarks.gloo import gloo_crew, gloo_subject
from benchmarks.groups import Ours, Threaded, ThreadSubject
from benchmarks.team import Team
from benchmarks.timing import Series, Subject, interleave

KIB, MIB = 2**10, 2**20
SIZES = {"cpu": (KIB, MIB, 64 * MIB), "cuda": (KIB, MIB, 16 * MIB, 256 * MIB)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    device: str
    ranks: Sequence[int]
    rounds: int
    gloo: bool
    operations: Sequence[str] = OPERATIONS
    sizes: Sequence[int] | None = None

    def cells(self, ranks: int) -> Iterator[Cell]:
        """The lines of the table for one world."""
        for operation in self.operations:
            sizes = self.sizes or SIZES[self.device.partition(":")[0]]
            for nbytes in (0,) if operation == "barrier" else sizes:
                yield Cell(operation, nbytes, ranks, self.device)


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[Cell, Series]:
    """Measure every cell of the plan."""
    results: dict[Cell, Series] = {}
    for ranks in plan.ranks:
        with ExitStack() as stack:
            team = stack.enter_context(closing(Team(ranks)))
            ours = stack.enter_context(closing(Ours(team, plan.device)))
            threaded = stack.enter_context(closing(Threaded(team)))
            gloo = stack.enter_context(closing(gloo_crew(ranks))) if plan.gloo else None
            for cell in plan.cells(ranks):
                progress(f"{cell.operation}, {size(cell.nbytes)}, {ranks} ranks")
                buffers = [Buffers.of(cell, rank) for rank in range(ranks)]
                subjects: list[Subject] = [ThreadSubject(group, team, cell, buffers) for group in (ours, threaded)]
                subjects.append(HandOff(team) if cell.small else Floor(team, cell, buffers))
                if gloo is not None:
                    subjects.append(gloo_subject(gloo, cell))

                results[cell] = interleave(subjects, plan.rounds)

    return results
