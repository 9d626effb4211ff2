"""Takes what one rank holds through the steps of a plan.

A rank that fails tells the ranks of every step that it leaves out, so that none waits for it: those of its line, and,
since they fail with it, those of their lines in the steps after.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from dtorch_core._copies import copy_into
from dtorch_core._groups import c10d
from dtorch_core._groups import notes as _notes
from dtorch_core._groups.group_calls import Launch, not_declared
from dtorch_core._selection.selector import spec_of
from dtorch_core.errors import UnsupportedOperationError
from dtorch_core.group import ThreadGroup
from dtorch_core.placement._geometry import Geometry, Moves
from dtorch_core.placement._mesh import Coordinate
from dtorch_core.placement._reduce import fill_neutral
from dtorch_core.placement._shards import Box, relative, shape_of, view
from dtorch_core.placement._steps import RedistributionPlan, Step

Groups = Sequence[ThreadGroup | None]
"""For each step the group of this rank's line; None for a local one."""


class Walk:
    """One tensor on its way, on one rank."""

    def __init__(self, call: str, plan: RedistributionPlan, place: Coordinate, groups: Groups) -> None:
        """
        :param call: what the peers are told if this rank can't go on.
        """
        self._call = call
        self._plan = plan
        self._place = place
        self._groups = groups

    def run(self, held: Tensor, geometry: Geometry) -> Tensor:
        """What this rank holds in the end, in memory of its own.

        :param held: what it holds in the beginning; it is not changed.
        """
        now, owned = held, False
        for number, (step, group) in enumerate(zip(self._plan.steps, self._groups, strict=True)):
            try:
                if group is None:
                    now, owned = self._locally(step, geometry, now, owned)
                    continue

                launch, now = self._prepared(step, group, geometry.moves(step, self._place), now, owned)
            except Exception as error:
                self.refuse(error, number)
                raise

            try:
                group.conduct(self._call, launch)
            except Exception as error:
                self.refuse(error, number + 1)  # all of this step have heard of it
                raise

            owned = True

        return now if owned else _copy(now)

    def refuse(self, error: Exception, first: int = 0) -> None:
        """Tell the peers of the steps from ``first`` on that this rank does not come."""
        for group in self._groups[first:]:
            if group is not None:
                with suppress(Exception):  # this one has ended: its ranks know
                    _notes.refuse(group.process_group, self._call, error)

    def _locally(self, step: Step, geometry: Geometry, held: Tensor, owned: bool) -> tuple[Tensor, bool]:
        before, after = (geometry.box(specs, self._place) for specs in (step.before, step.after))
        if step.kind == "slice":
            return view(held, relative(after, before)), False

        (dim,) = step.dims
        op = step.after[dim].op
        if step.kind == "mask" and (op == "avg" or self._place[dim] == 0):
            return held, owned

        result = torch.empty(shape_of(after), dtype=held.dtype, device=held.device)
        fill_neutral(result, op)
        if step.kind == "pad":
            copy_into(view(result, relative(before, after)), held)

        return result, True

    def _prepared(
        self, step: Step, group: ThreadGroup, moves: Moves, held: Tensor, owned: bool
    ) -> tuple[Launch, Tensor]:
        """What starts the collective, and what it writes its result to."""
        peers = group.process_group
        if step.kind == "all_reduce":
            total = held if owned else _copy(held)
            return lambda t: c10d.all_reduce(peers, total, _op(step), t), total

        self._check_uneven(group, moves)
        result = torch.empty(moves.shape, dtype=held.dtype, device=held.device)
        if step.kind == "reduce_scatter":
            terms = [_part(held, region) for region in moves.gives]
            return lambda t: c10d.reduce_scatter(peers, result, terms, _op(step), t), result

        parts = [_part(result, region) for region in moves.gets]
        if step.kind == "all_gather":
            mine = _part(held, moves.gives[group.rank])
            return lambda t: c10d.all_gather(peers, parts, mine, t), result

        given = [_part(held, region) for region in moves.gives]
        return lambda t: c10d.all_to_all(peers, parts, given, t), result

    def _check_uneven(self, group: ThreadGroup, moves: Moves) -> None:
        if len({shape_of(region) for region in (*moves.gives, *moves.gets)}) > 1:
            need(group, "uneven", self._call)


def need(group: ThreadGroup, capability: str, call: str) -> None:
    """Refuse what the group's backend does not declare.

    :raises UnsupportedOperationError: if it does not.
    """
    if capability not in spec_of(group.selection).capabilities:
        raise UnsupportedOperationError(
            f"{call}: the backend {group.backend!r} of group {group.name!r} {not_declared(capability)}"
        )


def _op(step: Step) -> str:
    return step.before[step.dims[0]].op


def _part(tensor: Tensor, region: Box) -> Tensor:
    shape = shape_of(region)
    return tensor.new_empty(shape) if 0 in shape else view(tensor, region)


def _copy(tensor: Tensor) -> Tensor:
    return copy_into(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), tensor)
