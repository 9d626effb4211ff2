"""Placements of ``torch.distributed.tensor``, read without importing it: that costs a second and is rarely needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from dtorch_core._text import did_you_mean
from dtorch_core.errors import UnsupportedOperationError
from dtorch_core.placement._mesh import Mesh
from dtorch_core.reduction import OPS

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

PARTIAL_OPS = tuple(op for op in OPS if op != "premul_sum")
"""The reduce ops of a Partial. (The factor of premul_sum is no part of a placement.)"""


class Spec(NamedTuple):
    """One placement: what one mesh dimension does to the tensor."""

    kind: Literal["Shard", "Replicate", "Partial"]
    dim: int = 0
    """The tensor dimension of a Shard; negative ones count from the end until :func:`resolve`."""
    op: str = ""
    """The reduce op of a Partial."""

    def __str__(self) -> str:
        return {"Shard": f"Shard({self.dim})", "Partial": f"Partial({self.op})"}.get(self.kind, self.kind)


Specs: TypeAlias = tuple[Spec, ...]
"""One for each mesh dimension."""


def read_placements(placements: Sequence[Placement], mesh: Mesh, what: str) -> Specs:
    """Take placements as callers write them.

    :param what: begins every message.
    :raises TypeError: if it is not a sequence of placements.
    :raises ValueError: if there is not one for each mesh dimension.
    :raises UnsupportedOperationError: for another kind of placement or reduce op, and for Partials of different ops,
        whose value would depend on the order of the mesh dimensions.
    """
    if not isinstance(placements, Sequence) or isinstance(placements, (str, bytes)):
        raise TypeError(f"{what}: placements must be a sequence, one for each mesh dimension, not {placements!r}")

    specs = tuple(_read(placement, what) for placement in placements)
    if len(specs) != len(mesh.shape):
        raise ValueError(
            f"{what}: {len(specs)} placements ({', '.join(map(str, specs))}) for the {len(mesh.shape)} dimensions of "
            f"the {mesh}; give one for each"
        )

    ops = sorted({spec.op for spec in specs if spec.kind == "Partial"})
    if len(ops) > 1:
        raise UnsupportedOperationError(
            f"{what}: Partials of different reduce ops ({', '.join(ops)}) on one tensor have no value of their own: it "
            f"would depend on which is reduced first"
        )

    return specs


def resolve(specs: Specs, mesh: Mesh, shape: Sequence[int], what: str) -> Specs:
    """The same with tensor dimensions counted from the front.

    :raises ValueError: if a tensor of this shape has no such dimension.
    """
    return tuple(
        Spec("Shard", _resolved(spec, mesh.describe_dim(number), shape, what)) if spec.kind == "Shard" else spec
        for number, spec in enumerate(specs)
    )


def partial_op(specs: Specs) -> str | None:
    """The one reduce op of all Partials among them, or None."""
    return next((spec.op for spec in specs if spec.kind == "Partial"), None)


def _read(placement: Any, what: str) -> Spec:  # noqa: ANN401 - checked here
    kind = type(placement)
    if not kind.__module__.startswith("torch.distributed."):
        raise TypeError(f"{what}: {placement!r} is not a placement of torch.distributed.tensor")

    # By the exact class: a subclass (_StridedShard, _MaskPartial) lays data out in its own way.
    if kind.__name__ == "Shard":
        return Spec("Shard", int(placement.dim))

    if kind.__name__ == "Replicate":
        return Spec("Replicate")

    if kind.__name__ == "Partial":
        op = placement.reduce_op
        if op not in PARTIAL_OPS:
            raise UnsupportedOperationError(
                f"{what}: Partial({op!r}): there is no such reduce op.{did_you_mean(str(op), PARTIAL_OPS)} "
                f"Known: {', '.join(PARTIAL_OPS)}"
            )

        return Spec("Partial", op=op)

    raise UnsupportedOperationError(
        f"{what}: the placement {kind.__name__} is not supported; use Shard, Replicate or Partial"
    )


def _resolved(spec: Spec, where: str, shape: Sequence[int], what: str) -> int:
    ndim = len(shape)
    if ndim == 0:
        raise ValueError(f"{what}: {spec} on {where}, but a 0-dim tensor has no dimension to shard; use Replicate")

    if not -ndim <= spec.dim < ndim:
        raise ValueError(
            f"{what}: {spec} on {where}, but the tensor of shape {list(shape)} has dimensions {-ndim} to {ndim - 1}"
        )

    return spec.dim % ndim
