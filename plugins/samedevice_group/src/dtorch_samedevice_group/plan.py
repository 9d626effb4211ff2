"""What one call of a process group is to do, before anything of it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dtorch_samedevice_group import collectives, overlaps
from dtorch_samedevice_group.arguments import Cut
from dtorch_samedevice_group.collectives import Collective
from dtorch_samedevice_group.overlaps import Roles


class Plan(NamedTuple):
    """What one call is to do."""

    call: str
    """The fingerprint: equal on every rank."""
    tensors: Sequence[Tensor]
    """Outputs first, in c10d's order, as :mod:`dtorch_samedevice_group.collectives` expects."""
    written: Sequence[Tensor]
    """Those of them that are outputs: the first ones."""
    work: Collective
    timeout: float | None
    data: str = ""
    """What the ranks tell each other besides; it may differ."""
    cut: Cut | None = None
    """How the tensors follow from those of the call, where they are not the same."""
    roles: Roles | None = None
    """None: no output of a rank can lie across an input that another rank reads."""
    result: Sequence[Tensor] | None = None
    """What the Work gives, where that is not what is written: the output of which those are pieces."""

    @property
    def note(self) -> str:
        """As :mod:`dtorch_samedevice_group.engine` reads it."""
        call = self.call
        if self.tensors and self.tensors[0].is_cuda:
            call += f" on {self.tensors[0].device}"

        return f"{call}\n{call}\n{self.data}" if self.data else call


def as_one(plans: Sequence[Plan]) -> Plan:
    """Several collectives as one, in one hand-off."""
    return Plan(
        " + ".join(plan.call for plan in plans),
        [tensor for plan in plans for tensor in plan.tensors],
        [tensor for plan in plans for tensor in plan.written],
        collectives.together([plan.work for plan in plans], [len(plan.tensors) for plan in plans]),
        plans[0].timeout if plans else None,
        roles=overlaps.as_one([plan.roles for plan in plans], [len(plan.tensors) for plan in plans]),
    )
