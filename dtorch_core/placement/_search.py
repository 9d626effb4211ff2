"""The cheapest way from one layout to another: a uniform-cost search over what the mesh dimensions may be in between.

A step costs a communication, or nothing; of ways with equally many the one that moves the fewest elements is taken.
Two communications always suffice: reduce all Partials, then deal out. Three rules keep every layout on the way exact:

- Mesh dimensions that cut one tensor dimension cut it in turn, the first one outermost. So a rank can cut what it has
  only by a mesh dimension that comes after those that have cut it already.
- Partials of two reduce ops never stand side by side.
- Partials of avg are reduced all at once: a mean of rounded means is not the mean. And avg has no neutral element, so
  a Shard is gathered before it becomes one.

No step is saved by padding shards to the whole and reducing them, which would move and add mostly neutral elements:
padding only makes a Partial that is asked for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from math import prod

from dtorch_core.placement._mesh import Mesh
from dtorch_core.placement._placements import Spec, Specs
from dtorch_core.placement._steps import Kind, RedistributionPlan, Step

REPLICATE = Spec("Replicate")
COMMUNICATIONS = 2
"""The most that a way needs."""


@lru_cache(maxsize=1024)
def plan_of(mesh: Mesh, src: Specs, dst: Specs) -> RedistributionPlan:
    """The plan for a pair of layouts; programs convert many tensors alike.

    It depends on nothing that ranks may know differently: not on shapes, nor on dtypes.

    :param src: with ``dst`` resolved, or with dims of one sign.
    """
    if src == dst:
        return RedistributionPlan(mesh, src, dst, ())

    # Along a mesh dimension of one rank every placement holds the same: the whole.
    start, end = (
        tuple(spec if size > 1 else REPLICATE for spec, size in zip(specs, mesh.shape, strict=True))
        for specs in (src, dst)
    )
    return RedistributionPlan(mesh, src, dst, _Search(mesh, start, end).find())


class _Search:
    def __init__(self, mesh: Mesh, src: Specs, dst: Specs) -> None:
        self.mesh = mesh
        self.src = src
        self.dst = dst
        self.wide = [number for number, size in enumerate(mesh.shape) if size > 1]
        self.dims = sorted({spec.dim for spec in (*src, *dst) if spec.kind == "Shard"})
        """The tensor dimensions that any layout on the way may cut."""
        ndim = max((dim + 1 if dim >= 0 else -dim for dim in self.dims), default=0)
        self.shape = (prod(mesh.shape),) * ndim
        """Of a tensor that every layout cuts into equal parts: it stands for all of them."""
        self.leads_home = cache(self._leads_home)

    def find(self) -> tuple[Step, ...]:
        """The cheapest steps."""
        ties = itertools.count()
        queue: list[tuple[int, int, int, int, Specs, tuple[Step, ...]]] = [(0, 0, 0, next(ties), self.src, ())]
        seen: set[Specs] = set()
        while queue:
            talks, moved, length, _, state, steps = heapq.heappop(queue)
            if state == self.dst:
                return steps

            if state in seen:
                continue

            seen.add(state)
            for step in self._steps(state, talks):
                cost = (talks + step.communicates, moved + step.received(self.mesh, self.shape), length + 1)
                heapq.heappush(queue, (*cost, next(ties), step.after, (*steps, step)))

        raise AssertionError(f"no way from {self.src} to {self.dst}")

    def _steps(self, state: Specs, talks: int) -> Iterator[Step]:
        yield from self._local(state)
        if talks < COMMUNICATIONS:
            last = talks + 1 == COMMUNICATIONS
            for step in itertools.chain(self._reductions(state), self._exchanges(state)):
                if not last or self.leads_home(step.after):
                    yield step

    def _local(self, state: Specs) -> Iterator[Step]:
        """Steps that need no other rank."""
        for number in self.wide:
            spec, goal = state[number], self.dst[number]
            if spec.kind == "Replicate":
                for dim in self.dims:
                    if _innermost(state, number, dim):
                        yield _step("slice", number, state, Spec("Shard", dim))

            if goal.kind != "Partial" or any(other.op not in ("", goal.op) for other in state):
                continue

            if spec.kind == "Replicate":
                yield _step("mask", number, state, goal)
            elif (
                spec.kind == "Shard"
                and self.src[number].kind == "Shard"
                and goal.op != "avg"
                and _innermost(state, number, spec.dim)
            ):
                yield _step("pad", number, state, goal)

    def _reductions(self, state: Specs) -> Iterator[Step]:
        """Some or all of the Partials reduced, each to a Replicate or a Shard."""
        partial = [number for number in self.wide if state[number].kind == "Partial"]
        fewest = len(partial) if any(spec.op == "avg" for spec in state) else 1
        for size in range(max(1, fewest), len(partial) + 1):
            for chosen in itertools.combinations(partial, size):
                whole = _replaced(state, chosen, [REPLICATE] * size)
                for targets in itertools.product(self._settled, repeat=size):
                    after = _replaced(state, chosen, targets)
                    if all(cutters(after, dim)[: len(cutters(whole, dim))] == cutters(whole, dim) for dim in self.dims):
                        yield Step("all_reduce" if after == whole else "reduce_scatter", chosen, state, after)

    def _exchanges(self, state: Specs) -> Iterator[Step]:
        """Every other way to cut what is not Partial.

        A rank finds all it needs on the ranks that differ from it in those mesh dimensions alone whose cuts have to
        go: of the cuts of each tensor dimension all from the first one on that is not the same afterwards.
        """
        chosen = [number for number in self.wide if state[number].kind != "Partial"]
        for targets in itertools.product(self._settled, repeat=len(chosen)):
            after = _replaced(state, chosen, targets)
            gone = sorted(
                number
                for dim in self.dims
                for number in cutters(state, dim)[common(cutters(state, dim), cutters(after, dim)) :]
            )
            if gone:
                gathers = all(after[number].kind == "Replicate" for number in gone)
                yield Step("all_gather" if gathers else "all_to_all", tuple(gone), state, after)

    @property
    def _settled(self) -> list[Spec]:
        return [REPLICATE, *(Spec("Shard", dim) for dim in self.dims)]

    def _leads_home(self, state: Specs) -> bool:
        """Local steps alone lead from here to the end."""
        return state == self.dst or any(
            step.after[step.dims[0]] == self.dst[step.dims[0]] and self.leads_home(step.after)
            for step in self._local(state)
        )


def cutters(specs: Specs, dim: int) -> list[int]:
    """The mesh dimensions that cut a tensor dimension, outermost first."""
    return [number for number, spec in enumerate(specs) if spec.kind == "Shard" and spec.dim == dim]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many items both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _innermost(state: Specs, number: int, dim: int) -> bool:
    """No later mesh dimension cuts the tensor dimension."""
    return not any(later > number for later in cutters(state, dim))


def _step(kind: Kind, number: int, before: Specs, spec: Spec) -> Step:
    return Step(kind, (number,), before, _replaced(before, [number], [spec]))


def _replaced(specs: Specs, numbers: Sequence[int], new: Sequence[Spec]) -> Specs:
    chosen = dict(zip(numbers, new, strict=True))
    return tuple(chosen.get(number, spec) for number, spec in enumerate(specs))
