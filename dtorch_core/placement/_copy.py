"""From one layout to another, across meshes and devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtorch_core._copies import copy_into
from dtorch_core._meeting.member import normal_device
from dtorch_core._selection.topology import Member
from dtorch_core.placement._agreement import checked
from dtorch_core.placement._call import Call
from dtorch_core.placement._exchange import convert
from dtorch_core.placement._mesh import Mesh, MeshLike
from dtorch_core.placement._placements import read_placements
from dtorch_core.placement._plan import Side, plan_of
from dtorch_core.store import TensorStore

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where a distributed tensor is, or is to be."""

    mesh: MeshLike
    """Ranks of a store, as nested ints, an int tensor or a DeviceMesh."""
    placements: Sequence[Placement]
    """Shard, Replicate or Partial, one for each mesh dimension."""
    device: str | torch.device | None = None
    """Of a destination: ``"cpu"``, ``"cuda"`` (the rank's own GPU, else the first) or ``"cuda:N"``; None is each rank's
    store device. Of a source it says nothing: a tensor is where it is."""


def copy_tensor(x: Tensor | None, store: TensorStore, src: Layout, dst: Layout) -> Tensor | None:
    """Bring a distributed tensor from one layout to another. Every rank of the store calls it.

    The meshes may be the same, overlap or be disjoint, and differ in size and dimensions. The parts of ``src`` may
    have any sizes that fit together; those of ``dst`` are as :func:`scatter_tensor` makes them. Between two equal
    layouts each rank copies its own part as it is, and no rank waits.

    :param x: this rank's part; not read on a rank outside the mesh of ``src``. It may be changed once this returns.
    :returns: a tensor of this rank's own, detached, on the device of ``dst``; None on a rank outside its mesh.
    :raises TypeError, ValueError: on every rank, if a mesh, its placements and device don't fit each other; if a part
        is missing, on its rank and those that depend on it.
    :raises UnsupportedOperationError: for another kind of placement.
    :raises UnsupportedTensorError: if a part can't be carried, or has no such Partial.
    :raises CollectiveMismatchError: if the parts don't fit together, or the ranks passed different arguments.
    """
    call = Call(store, "copy_tensor")
    source = _side(call, "src", src)
    target = _side(call, "dst", dst)
    target = replace(target, devices=_devices(call, target.mesh, dst.device))
    if (source.mesh, source.specs) != (target.mesh, target.specs):
        return convert(call, source, target, x)

    if call.rank not in source.mesh.ranks:
        return None

    held = checked(call.what, (source, target), x)
    device = plan_of(source, target).devices[call.rank]
    return copy_into(torch.empty(held.shape, dtype=held.dtype, device=device), held)


def _side(call: Call, name: str, layout: Layout) -> Side:
    if not isinstance(layout, Layout):
        raise TypeError(f"{call.what}: {name} must be a Layout, not {layout!r}")

    mesh = Mesh.read(layout.mesh, call.store.world_size, f"{call.what}, {name}")
    return Side(mesh, read_placements(layout.placements, mesh, f"{call.what}, {name}"))


def _devices(call: Call, mesh: Mesh, device: str | torch.device | None) -> tuple[str, ...]:
    """Where each rank's result goes: computed alike on every rank, since senders move data there.

    :raises ValueError: if torch knows no such device, or a rank of this process has none.
    """
    topology = call.store.topology
    if device is None:
        return tuple(topology[rank].device for rank in mesh.ranks)

    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{call.what}, dst: device {device!r} is not one that torch knows") from None

    try:
        if wanted.type not in ("cpu", "cuda"):
            raise ValueError(f"device {str(device)!r}: ranks use 'cpu' or 'cuda:N'")

        devices = tuple(_device(topology[rank], wanted) for rank in mesh.ranks)
        for rank, own in zip(mesh.ranks, devices, strict=True):
            if topology[rank].process == topology[call.rank].process:
                normal_device(own)
    except ValueError as error:
        raise ValueError(f"{call.what}, dst: {error}") from None

    return devices


def _device(member: Member, wanted: torch.device) -> str:
    if wanted.type == "cuda" and wanted.index is None:
        return member.device if member.device_type == "cuda" else "cuda:0"

    return str(wanted)
