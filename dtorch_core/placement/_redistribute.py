"""From one layout to another on the same ranks, over ThreadGroups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtorch_core.group import ThreadGroup
from dtorch_core.manager import ThreadGroupManager
from dtorch_core.placement._conversion import Conversion, read_shape
from dtorch_core.placement._mesh import Mesh, MeshLike
from dtorch_core.placement._placements import read_placements, resolve
from dtorch_core.placement._search import plan_of
from dtorch_core.placement._steps import RedistributionPlan

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def redistribute(
    x: Tensor,
    group: ThreadGroup,
    src: Placement | Sequence[Placement],
    dst: Placement | Sequence[Placement],
    *,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Bring a tensor that the ranks of a group hold from one placement to another. Every rank of the group calls it.

    ============= ============== ============== ============== =======================================================
    src           Shard(i)       Shard(j)       Replicate      Partial
    ============= ============== ============== ============== =======================================================
    Shard(i)      itself         all_to_all     all_gather     padded with the neutral element, no communication [1]_
    Replicate     local slice    local slice    itself         the value on rank 0, the neutral element elsewhere [1]_
    Partial       reduce_scatter reduce_scatter all_reduce     itself; to another reduce op through Replicate
    ============= ============== ============== ============== =======================================================

    .. [1] avg has no neutral element: the value on every rank, whose mean it is; a Shard is gathered first.

    A source may have shards of any sizes; the shards that this makes have those of ``torch.chunk``, so the last ones
    may be smaller or empty. Reductions follow :mod:`dtorch_core.reduction`, in rank order.

    :param x: this rank's part: any strided tensor. It is not changed.
    :param src: one placement, or a sequence of one.
    :param shape: the shape of the whole tensor, if its shards have the sizes of ``torch.chunk``. Without it the ranks
        tell each other the sizes of their shards, once, where a step depends on them.
    :returns: ``x`` itself where the table says so; else a contiguous tensor of this rank's own, detached.
    :raises TypeError, ValueError: on every rank, if the placements, or ``shape``, can't be; on its rank, if ``x`` does
        not fit them.
    :raises UnsupportedOperationError: for another kind of placement.
    :raises UnsupportedTensorError: if ``x`` can't be carried, or has no such Partial.
    :raises CollectiveMismatchError: if the parts don't fit together, or another rank could not go on.
    """
    what = f"redistribute on group {group.name!r}, rank {group.rank}"
    conversion = Conversion("redistribute", what, group.rank, _row(group.world_size), lambda _: group)
    result = conversion.run(_sequence(src), _sequence(dst), x, shape)
    assert result is not None, "every rank of the group is in its mesh"
    return result


def redistribute_mesh(
    x: Tensor | None,
    manager: ThreadGroupManager,
    mesh: MeshLike,
    src: Sequence[Placement],
    dst: Sequence[Placement],
    *,
    shape: Sequence[int] | None = None,
) -> Tensor | None:
    """Bring a tensor from one layout to another on a mesh. Every rank of the mesh calls it; others may.

    It takes the fewest communications, and of those the ones that move least: :func:`plan_redistribution` shows them.
    The table of :func:`redistribute` holds for each mesh dimension. Several mesh dimensions may change in one step,
    which then runs over the ranks that differ in any of them; these groups come from ``manager``. As with any calls on
    shared groups, threads of a rank have to call in one order on all ranks.

    Several mesh dimensions on one tensor dimension cut it in turn, the first one into the longest parts. A mesh
    dimension that goes on cutting it as before, inside of the same cuts, keeps the sizes that the source has.

    :param x: this rank's part; not read on a rank outside the mesh. It is not changed.
    :param mesh: ranks of the manager, as nested ints, an int tensor or a DeviceMesh. It may leave ranks out.
    :param src: Shard, Replicate or Partial, one for each mesh dimension. All Partials have one reduce op.
    :param shape: as of :func:`redistribute`.
    :returns: ``x`` itself if ``src`` and ``dst`` are one layout; else a contiguous tensor of this rank's own, detached;
        None on a rank outside the mesh.
    :raises TypeError, ValueError, UnsupportedOperationError, UnsupportedTensorError, CollectiveMismatchError: as
        :func:`redistribute`.
    """
    what = f"redistribute_mesh on manager {manager.name!r}, rank {manager.rank}"
    grid = Mesh.read(mesh, manager.world_size, what)
    return Conversion("redistribute_mesh", what, manager.rank, grid, manager.get).run(src, dst, x, shape)


def plan_redistribution(
    mesh: MeshLike,
    src: Sequence[Placement],
    dst: Sequence[Placement],
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> RedistributionPlan:
    """The steps that :func:`redistribute_mesh` takes, without taking them; ``print`` it. Local.

    :param shape: of the whole tensor; with it the plan says how many elements move, with ``dtype`` too how many bytes.
    :raises TypeError, ValueError, UnsupportedOperationError: as :func:`redistribute_mesh`; also if Shards of negative
        and other dims stand side by side, and no shape says which they are.
    """
    what = "plan_redistribution"
    grid = Mesh.read(mesh, None, what)
    source, target = read_placements(src, grid, f"{what}, src"), read_placements(dst, grid, f"{what}, dst")
    whole = read_shape(shape, what)
    if whole is not None:
        source, target = (resolve(specs, grid, whole, what) for specs in (source, target))
    elif len({spec.dim < 0 for spec in (*source, *target) if spec.kind == "Shard"}) > 1:
        raise ValueError(f"{what}: Shards of negative and of other dims, so the plan depends on the shape: give it")

    return RedistributionPlan(grid, source, target, plan_of(grid, source, target).steps, whole, dtype)


@lru_cache(maxsize=64)
def _row(size: int) -> Mesh:
    return Mesh((size,), tuple(range(size)))


def _sequence(placements: Placement | Sequence[Placement]) -> Sequence[Placement]:
    return placements if isinstance(placements, Sequence) else [placements]
