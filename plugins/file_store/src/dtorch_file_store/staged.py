"""Does one process's part of a plan: blocks of tensors and staging buffers are copied and reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dtorch_core._copies import cloned, copy_into
from dtorch_core.declared import Place, Result, at_risk, compute
from dtorch_core.joint import Task
from dtorch_file_store.staging import Block, Plan, Spot, Step

BLOCK_BYTES = 512 * 1024
"""What is worked on at a time of each tensor, so that it stays in cache, where it is gone through more than once."""


class Flat:
    """The tensors of this process's ranks as runs of elements: themselves, or contiguous copies.

    To be made and used in inference mode.
    """

    def __init__(self, results: Sequence[Result], tensors: Mapping[int, Sequence[Tensor]]) -> None:
        risky = set(at_risk(results, tensors))
        self.sources: dict[Place, Tensor] = {}
        self.targets: dict[Place, Tensor] = {}
        self.copies: set[Place] = set()
        """The places of which other processes can't see the tensor itself."""
        self._back: list[tuple[Tensor, Tensor]] = []
        for place in _places([result.sources for result in results], tensors):
            tensor = tensors[place.rank][place.number]
            if place in risky or not _plain(tensor):
                self.copies.add(place)
                tensor = cloned(tensor, torch.contiguous_format)

            self.sources[place] = tensor.view(-1)

        for place in _places([result.targets for result in results], tensors):
            tensor = tensors[place.rank][place.number]
            if _plain(tensor):
                self.targets[place] = tensor.view(-1)
                continue

            self.copies.add(place)
            copy = self.sources[place] if place in self.sources and place not in risky else None
            if copy is None:
                copy = torch.empty(tensor.numel(), dtype=tensor.dtype)

            self.targets[place] = copy
            self._back.append((tensor, copy.view(tensor.shape)))

    def finish(self) -> None:
        """Write the results to where they belong, as far as they are not there."""
        for tensor, copy in self._back:
            copy_into(tensor, copy)


class Staged:
    """One process's part of a plan, on its tensors and everyone's staging buffers. To be used in inference mode.

    :param halves: the two halves of each process's buffer, as bytes, each of at least ``plan.half_bytes``, aligned to
        64; this process writes its own.
    :param remote: another process's mapped tensor, flat.
    :param turn: the steps of all work that was staged in these buffers before.
    """

    def __init__(
        self,
        plan: Plan,
        process: int,
        flat: Flat,
        halves: Mapping[int, Sequence[Tensor]],
        remote: Callable[[Place], Tensor],
        turn: int,
    ) -> None:
        self._plan, self._process, self._flat = plan, process, flat
        self._halves, self._remote, self._turn = halves, remote, turn
        self._number, self._step = -1, Step((), ())
        self._runs: dict[tuple[int, int, int, int, torch.dtype], Tensor] = {}

    def stage(self, number: int) -> Sequence[Task]:
        """What is to be done before the exchange of step ``number``, in any order."""
        half = (self._turn + number) % 2
        return [task for block in self._at(number).stage for task in self._tasks(block, half, half)]

    def compute(self, number: int) -> Sequence[Task]:
        """What is to be done after it, in any order."""
        half = (self._turn + number) % 2
        return [task for block in self._at(number).compute for task in self._tasks(block, half, 1 - half)]

    def _at(self, number: int) -> Step:
        if number != self._number:
            self._number, self._step = number, self._plan.step(self._process, number)

        return self._step

    def _tasks(self, block: Block, read_half: int, write_half: int) -> Iterable[Task]:
        sources = [self._run(spot, block, self._flat.sources, read_half) for spot in block.sources]
        targets = [self._run(spot, block, self._flat.targets, write_half) for spot in block.targets]
        length = BLOCK_BYTES // block.dtype.itemsize
        if block.length <= length or _in_one_pass(block):
            return [partial(compute, block.rule, block.factor, sources, targets)]

        return [
            partial(compute, block.rule, block.factor, parts[: len(sources)], parts[len(sources) :])
            for parts in zip(*[run.split(length) for run in (*sources, *targets)], strict=True)
        ]

    def _run(self, spot: Spot, block: Block, flat: Mapping[Place, Tensor], half: int) -> Tensor:
        if spot.place is None:
            key = spot.process, half, spot.start, block.length, block.dtype
            run = self._runs.get(key)
            if run is None:  # most steps are cut alike
                end = spot.start + block.length * block.dtype.itemsize
                run = self._runs[key] = self._halves[spot.process][half][spot.start : end].view(block.dtype)

            return run

        tensor = flat[spot.place] if spot.process == self._process else self._remote(spot.place)
        return tensor.narrow(0, spot.start, block.length)


def _in_one_pass(block: Block) -> bool:
    """Each element is read and written once."""
    if len(block.targets) > 1:
        return False

    rule = block.rule
    return rule is None or (len(block.sources) == 2 and rule.in_place and rule.op != "avg")


def _places(lists: Iterable[Sequence[Place]], tensors: Mapping[int, Sequence[Tensor]]) -> Iterable[Place]:
    return dict.fromkeys(place for places in lists for place in places if place.rank in tensors)


def _plain(tensor: Tensor) -> bool:
    """Its elements are in memory as it reads them."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
