"""From the ranks of a mesh to one rank."""

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


def gather_tensor(
    local: Tensor | None, store: TensorStore, mesh: MeshLike, placements: Sequence[Placement], *, dst: int
) -> Tensor | None:
    """Put the parts that the ranks of a mesh hold together on rank ``dst``. Every rank of the store calls it.

    Shards may have any sizes that fit together, not only those of ``torch.chunk``. Partials are reduced in mesh order
    by the rules of :mod:`dtorch_core.reduction`. Of equal parts one is taken; the others return at once.

    :param local: this rank's part; not read on a rank outside the mesh. It may be changed once this returns.
    :param mesh: ranks of the store, as nested ints, an int tensor or a DeviceMesh. It may leave ranks out, ``dst`` too.
    :param placements: Shard, Replicate or Partial, one for each mesh dimension.
    :returns: on rank ``dst`` a tensor of its own, detached, on the store's device; None elsewhere.
    :raises TypeError, ValueError: on every rank, if mesh, placements and ``dst`` don't fit each other; if a part is
        missing, on its rank and on ``dst``.
    :raises UnsupportedOperationError: for another kind of placement.
    :raises UnsupportedTensorError: if a part can't be carried, or has no such Partial.
    :raises CollectiveMismatchError: on ``dst``, if the parts don't fit together; on all who notice, if the ranks passed
        different arguments.
    """
    call = Call(store, "gather_tensor")
    grid = Mesh.read(mesh, store.world_size, call.what)
    specs = read_placements(placements, grid, call.what)
    return convert(call, Side(grid, specs), one_rank(call, dst, "dst"), local)
