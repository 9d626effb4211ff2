"""From one rank to the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from dtorch_core.placement._call import Call
from dtorch_core.placement._exchange import convert, one_rank
from dtorch_core.placement._mesh import Mesh, MeshLike
from dtorch_core.placement._placements import read_placements
from dtorch_core.placement._plan import Side
from dtorch_core.store import TensorStore

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def scatter_tensor(
    full: Tensor | None, store: TensorStore, mesh: MeshLike, placements: Sequence[Placement], *, src: int
) -> Tensor | None:
    """Give each rank of a mesh its part of the tensor that rank ``src`` holds. Every rank of the store calls it.

    Shards have the sizes of ``torch.chunk``, so the last ones may be smaller or empty. A Partial is the value on
    rank 0 of its mesh dimension and the neutral element elsewhere (for avg: the value everywhere).

    :param full: any strided tensor, on any device; read on rank ``src`` only. It may be changed once this returns.
    :param mesh: ranks of the store, as nested ints, an int tensor or a DeviceMesh. It may leave ranks out, ``src`` too.
    :param placements: Shard, Replicate or Partial, one for each mesh dimension.
    :returns: a tensor of this rank's own, detached, on the store's device; None on a rank outside the mesh.
    :raises TypeError, ValueError: on every rank, if mesh, placements and ``src`` don't fit each other or the tensor.
    :raises UnsupportedOperationError: for another kind of placement.
    :raises UnsupportedTensorError: if ``full`` can't be carried, or has no such Partial.
    :raises CollectiveMismatchError: if the ranks passed different arguments; on those that find out.
    """
    call = Call(store, "scatter_tensor")
    grid = Mesh.read(mesh, store.world_size, call.what)
    specs = read_placements(placements, grid, call.what)
    devices = tuple(store.topology[rank].device for rank in grid.ranks)
    return convert(call, one_rank(call, src, "src"), Side(grid, specs, devices), full)
