"""Plans declared work for processes that show each other small staging buffers: which bytes go where, and when.

Work is done in steps. In each one a process

1. *stages*: copies blocks of its own tensors to its buffer;
2. *exchanges*: says that it has staged, and waits until every other process has said so;
3. *computes*: reads its own tensors and what others have staged, writes its own tensors, and may already write to its
   buffer what belongs to the next step.

A buffer has two halves; the data of step k lie in half k % 2. That one exchange a step is enough: a half is written for
step k after exchange k - 1. Whoever said k - 1 has ended its compute of step k - 2, the last that read this half. The
same holds from one piece of work to the next, if the steps are counted on.

All that is staged is read while it is in cache. Every result advances a little in each step, so that all processes have
as much to do at any time. A reduction that several processes want is split among them: each reduces a part, and the
others copy it in the next step.

The plan is a pure function of what all processes know, and equal in all of them. It counts in elements of tensors in
memory order: strided, conjugate and negative tensors are made contiguous by their process first, see
:mod:`dtorch_file_store.staged`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from dtorch_core.declared import Place, Result, Shapes
from dtorch_core.reduction import Rule

CHUNK_BYTES = 1024 * 1024
"""What a process stages in a step, about, where values are copied. It has to stay in cache until all have read it."""

REDUCED_BYTES = 2 * CHUNK_BYTES
"""The same where values are reduced: each is read once only, so that fewer steps count for more. (Both measured.)"""

SPLIT_BYTES = 256 * 1024
"""Smaller reductions are not split: copying the parts takes one step more."""

SPLIT_HOMES = 3
"""Nor are those that fewer processes want. Two have as little to do if each reduces everything, and no step more."""

GRAIN = 64
"""Tensors are cut at multiples of this many elements, so that blocks begin at cache lines and torch's vectors fit."""


_MOST_STEPS = 512
"""Steps that a plan remembers: it may serve many calls, and working one out takes as long as copying 100 KiB."""


class Spot(NamedTuple):
    """Where a block is read or written."""

    place: Place | None
    """A tensor; None: the process's buffer."""
    process: int
    start: int
    """In a tensor, the first element. In a buffer, the first byte of the half: to read or stage, of this step's; to
    write in a compute, of the next step's."""


class Block(NamedTuple):
    """Elements to be copied or reduced, as :func:`dtorch_core.declared.compute` does."""

    dtype: torch.dtype
    length: int
    sources: Sequence[Spot]
    targets: Sequence[Spot]
    rule: Rule | None = None
    factor: float | None = None


class Step(NamedTuple):
    """One process's part in a step. The blocks of each list may be done in any order, or at once."""

    stage: Sequence[Block]
    compute: Sequence[Block]


class _Job(NamedTuple):
    """One result, by processes."""

    result: Result
    dtype: torch.dtype
    length: int
    homes: dict[int, list[Place]]
    """The targets in each process that has any."""
    split: bool
    """Each home reduces a part of it."""
    offset: int
    """Where it begins in its lane, in bytes; all are rounded up to whole grains."""

    @property
    def grains(self) -> int:
        return -(-self.length // GRAIN)

    @property
    def nbytes(self) -> int:
        return self.grains * GRAIN * self.dtype.itemsize

    def cut(self, at: int) -> int:
        """The element before which the lane is cut at byte ``at``."""
        grains = -(-(at - self.offset) // (GRAIN * self.dtype.itemsize))
        return min(max(grains, 0) * GRAIN, self.length)


class _Lane(NamedTuple):
    """Results that go from the same processes to the same processes, one behind the other."""

    jobs: list[_Job]
    offsets: list[int]
    blocks: Counter[int]
    """How many blocks each process stages of a piece."""

    @property
    def nbytes(self) -> int:
        return self.jobs[-1].offset + self.jobs[-1].nbytes

    def piece(self, number: int, of: int) -> Iterator[tuple[_Job, int, int]]:
        """One of ``of`` equal pieces: the elements from which to which, of which results."""
        low, high = self.nbytes * number // of, self.nbytes * (number + 1) // of
        for job in self.jobs[max(0, bisect_right(self.offsets, low) - 1) :]:
            if job.offset >= high:
                break

            start, end = job.cut(low), job.cut(high)
            if start < end:
                yield job, start, end


class Plan:
    """What each process does in each step.

    :param process_of: the process of each rank.
    :param chunk_bytes: what a process stages in a step, about; any number above 0.
    :param mapped: the tensors that other processes can read where they are, and that their own has neither copied nor
        found :func:`~dtorch_core.declared.at_risk`. They are not staged, as far as that is safe.
    :param split_bytes: reductions of at least this size are split, if at least ``split_homes`` processes want them, or
        if they are in place in mapped tensors: those would have to be staged.
    """

    def __init__(
        self,
        results: Sequence[Result],
        shapes: Shapes,
        process_of: Sequence[int],
        *,
        chunk_bytes: int | None = None,
        split_bytes: int = SPLIT_BYTES,
        split_homes: int = SPLIT_HOMES,
        mapped: Collection[Place] = (),
    ) -> None:
        self._known: dict[tuple[int, int], Step] = {}
        self._process_of, self._mapped = process_of, frozenset(mapped)
        self._split_bytes, self._split_homes = split_bytes, split_homes
        self._lanes = self._into_lanes(results, shapes)
        jobs = [job for lane in self._lanes for job in lane.jobs if job.length]
        staged: Counter[int] = Counter()
        for lane in self._lanes:
            for process, blocks in lane.blocks.items():
                staged[process] += blocks * lane.nbytes

        self._pieces = max(1, math.ceil(max(staged.values(), default=0) / (chunk_bytes or _chunk_of(results))))
        split = any(job.split for job in jobs)
        left = max((self._left(job) for job in jobs), default=0) if self._mapped else 0
        self.steps = max(self._pieces + split, left)
        """How many. The last may have no blocks: its exchange then says that nobody reads mapped tensors any more."""
        self.half_bytes = max((self._room(process) for process in set(process_of)), default=0)
        """The most that half a buffer holds; a multiple of :data:`GRAIN`."""

    def step(self, process: int, number: int) -> Step:
        """What ``process`` does in step ``number``."""
        known = self._known.get((process, number))
        if known is None:
            known = self._step(process, number)
            if len(self._known) < _MOST_STEPS:
                self._known[process, number] = known

        return known

    def _step(self, process: int, number: int) -> Step:
        stage: list[Block] = []
        compute: list[Block] = []
        ends: Counter[int] = Counter()  # of what each process's half holds
        for job, start, end in self._piece(number - 1):
            for worker, low, high in _parts(job, start, end) if job.split else ():
                spot = self._reduced(job, worker, low, high, ends)
                if process in job.homes and process != worker:
                    compute.append(Block(job.dtype, high - low, [spot], _spots(job.homes[process], process, low)))

        later: Counter[int] = Counter()
        for job, start, end in self._piece(number):
            for worker, low, high in _parts(job, start, end):
                sources = []
                for place in job.result.sources:
                    owner = self._process_of[place.rank]
                    spot = Spot(place, owner, low)
                    if self._is_staged(job, place, worker):
                        own, spot = spot, Spot(None, owner, _take(ends, owner, job, low, high))
                        if owner == process:
                            stage.append(Block(job.dtype, high - low, [own], [spot]))
                            spot = own

                    sources.append(spot)

                targets = []
                if job.split:
                    spot = self._reduced(job, worker, low, high, later)
                    targets = [spot] if worker == process and spot.place is None else []

                if process in job.homes and worker in (process, None):
                    targets += _spots(job.homes[process], process, low)
                    rule, factor = job.result.rule, job.result.factor
                    compute.append(Block(job.dtype, high - low, sources, targets, rule, factor))

        return Step(stage, compute)

    def _into_lanes(self, results: Sequence[Result], shapes: Shapes) -> list[_Lane]:
        lanes: dict[object, _Lane] = {}
        for result in results:
            homes: dict[int, list[Place]] = {}
            for place in result.targets:
                homes.setdefault(self._process_of[place.rank], []).append(place)

            if not homes:
                continue

            first = result.sources[0]
            shape = shapes[first.rank][first.number]
            length = math.prod(shape.sizes)
            split = self._is_split(result, len(homes), length * shape.dtype.itemsize)
            job = _Job(result, shape.dtype, length, homes, split, 0)
            blocks = Counter(
                self._process_of[place.rank]
                for place in result.sources
                if self._is_staged(job, place, None) or (split and place in self._mapped)
            )
            key = tuple(sorted(homes)), tuple(sorted(blocks.items())), split
            lane = lanes.setdefault(key, _Lane([], [], blocks))
            offset = lane.nbytes if lane.jobs else 0
            lane.jobs.append(job._replace(offset=offset))
            lane.offsets.append(offset)

        return list(lanes.values())

    def _is_split(self, result: Result, homes: int, nbytes: int) -> bool:
        if result.rule is None or homes == 1:
            return False

        if result.rule.op == "product" and result.rule.dtype.is_complex:
            return True  # only whoever computes it knows the last bits: see dtorch_core.declared.compute

        worthwhile = homes >= self._split_homes or any(place in self._mapped for place in result.targets)
        return worthwhile and nbytes >= self._split_bytes

    def _piece(self, number: int) -> Iterator[tuple[_Job, int, int]]:
        if 0 <= number < self._pieces:
            for lane in self._lanes:
                yield from lane.piece(number, self._pieces)

    def _is_staged(self, job: _Job, place: Place, worker: int | None) -> bool:
        """Another process reads this source, but not where it is: ``worker``, or, where None, every home."""
        owner = self._process_of[place.rank]
        if owner == worker or (worker is None and len(job.homes) == 1 and owner in job.homes):
            return False

        # Reduced by all in place, it is overwritten here while others read it.
        return place not in self._mapped or (not job.split and place in job.result.targets)

    def _reduced(self, job: _Job, worker: int | None, low: int, high: int, ends: Counter[int]) -> Spot:
        """Where the others find the part that ``worker`` has reduced."""
        assert worker is not None
        for place in job.homes[worker]:
            if place in self._mapped:
                return Spot(place, worker, low)

        return Spot(None, worker, _take(ends, worker, job, low, high))

    def _left(self, job: _Job) -> int:
        """How many steps it takes until everyone has ended with its mapped tensors."""
        if job.split and any(place in self._mapped for place in job.result.targets):
            return self._pieces + 2

        for place in job.result.sources:
            if place in self._mapped and (len(job.homes) > 1 or self._process_of[place.rank] not in job.homes):
                return self._pieces + 1

        return 0

    def _room(self, process: int) -> int:
        # Of a split reduction a half also holds what was reduced in the step before.
        room = 0
        for lane in self._lanes:
            piece = -(-lane.nbytes // self._pieces // GRAIN) * GRAIN + _MOST_BYTES
            room += piece * (lane.blocks[process] + lane.jobs[0].split)

        return room


_MOST_BYTES = GRAIN * torch.complex128.itemsize
"""Of a grain: by less than one a piece of a lane is longer than others."""


def _chunk_of(results: Sequence[Result]) -> int:
    return REDUCED_BYTES if any(result.rule is not None for result in results) else CHUNK_BYTES


def _parts(job: _Job, start: int, end: int) -> Iterator[tuple[int | None, int, int]]:
    """Who computes a piece: all homes everything (None), or each home a part of it."""
    if not job.split:
        yield None, start, end
        return

    grains, low = -(-(end - start) // GRAIN), start
    for number, worker in enumerate(sorted(job.homes), 1):
        high = min(start + grains * number // len(job.homes) * GRAIN, end)
        if low < high:
            yield worker, low, high

        low = high


def _take(ends: Counter[int], process: int, job: _Job, low: int, high: int) -> int:
    """Room for a block at the end of what a process's half holds."""
    start = ends[process]
    ends[process] += -(-(high - low) // GRAIN) * GRAIN * job.dtype.itemsize
    return start


def _spots(places: Sequence[Place], process: int, start: int) -> list[Spot]:
    return [Spot(place, process, start) for place in places]
