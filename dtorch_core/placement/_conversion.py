"""One call of a redistribution on one rank: what is checked, what the ranks tell each other, then the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from dtorch_core._groups import notes as _notes
from dtorch_core.checks import plain_tensor
from dtorch_core.errors import CollectiveMismatchError
from dtorch_core.group import ThreadGroup
from dtorch_core.placement._agreement import checked
from dtorch_core.placement._geometry import Geometry, of_piece, of_pieces, of_shape
from dtorch_core.placement._hello import Hello
from dtorch_core.placement._mesh import Coordinate, Mesh
from dtorch_core.placement._placements import Specs, partial_op, read_placements, resolve
from dtorch_core.placement._plan import Side
from dtorch_core.placement._search import plan_of
from dtorch_core.placement._shards import chunk_box, shape_of
from dtorch_core.placement._steps import RedistributionPlan
from dtorch_core.placement._walk import Walk, need

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

BITWISE = ("band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Conversion:
    """One call on one rank."""

    function: str
    what: str
    """Begins every message."""
    rank: int
    """Of the mesh's."""
    mesh: Mesh
    group_of: Callable[[Sequence[int]], ThreadGroup]
    """The group of some ranks of the mesh, in their order."""

    def run(
        self, src: Sequence[Placement], dst: Sequence[Placement], x: Tensor | None, given: Sequence[int] | None
    ) -> Tensor | None:
        """This rank's part afterwards; None on a rank outside the mesh.

        :param given: the shape of the whole tensor, if the caller knows it.
        """
        # What is wrong on all ranks alike is found before any of them waits.
        shape = read_shape(given, self.what)
        source = read_placements(src, self.mesh, f"{self.what}, src")
        target = read_placements(dst, self.mesh, f"{self.what}, dst")
        if shape is not None:
            source, target = (resolve(specs, self.mesh, shape, self.what) for specs in (source, target))

        if self.rank not in self.mesh.ranks:
            return None

        plan = _plan(self.mesh, source, target, plain_tensor(x).dim() if shape is None and isinstance(x, Tensor) else 0)
        seat = plan.seat(self.rank)
        # All groups before anything that can fail on one rank alone: it has to reach the ranks of every step.
        audience = self.group_of(seat.span) if shape is None and plan.needs_sizes else None
        groups = [None if line is None else self.group_of(line) for line in seat.lines]
        if partial_op(source) in BITWISE:
            for group in filter(None, groups):
                need(group, "bitwise_ops", self.what)

        text = f"{self.function} from {plan.title}"
        walk = Walk(text, plan, seat.place, groups)
        try:
            held = checked(self.what, (Side(self.mesh, source), Side(self.mesh, target)), x)
            if shape is not None:
                self._check_piece(plan, seat.place, shape, held)
        except Exception as error:
            if audience is None:
                walk.refuse(error)
            else:
                _post(audience, text, Hello.failed(text, error))

            raise

        if plan.src == plan.dst:
            return x

        if shape is not None:
            geometry = of_shape(plan, shape)
        elif audience is None:
            geometry = of_piece(plan, tuple(held.shape))
        else:
            geometry = self._compare(audience, text, plan, held)

        return walk.run(held.resolve_conj().resolve_neg(), geometry)

    def _check_piece(self, plan: RedistributionPlan, place: Coordinate, shape: tuple[int, ...], held: Tensor) -> None:
        wanted = shape_of(chunk_box(shape, self.mesh, plan.src, place))
        if tuple(held.shape) != wanted:
            raise ValueError(
                f"{self.what}: this rank's part has the shape {list(held.shape)}, but of a tensor of shape "
                f"{list(shape)} it holds {list(wanted)}; leave shape= out where shards have sizes of their own"
            )

    def _compare(self, audience: ThreadGroup, text: str, plan: RedistributionPlan, held: Tensor) -> Geometry:
        """Exchange the shapes of all pieces, and see where they lie.

        :raises CollectiveMismatchError: on all ranks, if they don't fit together.
        :raises Exception: what one of the others raised.
        """
        ranks = plan.seat(self.rank).span
        notes = _post(audience, text, Hello.of(text, held))
        notes.wait(audience.timeout)
        hellos = [Hello.from_json(words) for words in notes.texts()]
        for rank, hello in zip(ranks, hellos, strict=True):
            error = hello.refusal(self.what, rank, text)
            if error is not None:
                raise error

            if hello.dtype != hellos[0].dtype:
                raise CollectiveMismatchError(
                    f"{self.what}: rank {ranks[0]} holds {hellos[0].dtype} and rank {rank} {hello.dtype}; the parts of "
                    f"one tensor have one dtype"
                )

        return of_pieces(plan, tuple(hello.shape for hello in hellos), tuple(ranks), self.what)


@lru_cache(maxsize=1024)
def _plan(mesh: Mesh, source: Specs, target: Specs, ndim: int) -> RedistributionPlan:
    """The plan of a rank whose tensor has ``ndim`` dimensions; if they are too few, the one that its peers may have."""
    fewest = [spec.dim + 1 if spec.dim >= 0 else -spec.dim for spec in (*source, *target) if spec.kind == "Shard"]
    sizes = (0,) * max(ndim, *fewest, 0)
    return plan_of(mesh, resolve(source, mesh, sizes, ""), resolve(target, mesh, sizes, ""))


def read_shape(shape: Sequence[int] | None, what: str) -> tuple[int, ...] | None:
    """Take the shape of a whole tensor as callers write it.

    :raises TypeError: if it is no sequence of ints.
    :raises ValueError: if one of them is negative.
    """
    if shape is None:
        return None

    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else None
    if sizes is None or any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise TypeError(f"{what}: shape must be the sizes of the whole tensor, ints, not {shape!r}")

    if any(size < 0 for size in sizes):
        raise ValueError(f"{what}: a tensor can't have the shape {list(sizes)}")

    return sizes


def _post(audience: ThreadGroup, text: str, hello: Hello) -> _notes.Notes:
    call = text if hello.error is None else f"{text}: raised {hello.error[0]}: {hello.error[1]}"
    return _notes.post(audience.process_group, audience.device, text, call, hello.to_json(), audience.timeout)
