"""How the ranks of a conversion learn what the others hold, and that one of them can't go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dtorch_core.checks import check_tensor, plain_tensor
from dtorch_core.errors import CollectiveMismatchError, DtorchError
from dtorch_core.placement._call import Call, Key, data_key, hello_key
from dtorch_core.placement._hello import Hello
from dtorch_core.placement._mesh import Coordinate
from dtorch_core.placement._placements import resolve
from dtorch_core.placement._plan import Plan, Side
from dtorch_core.placement._reduce import check_partial
from dtorch_core.placement._shards import Box, fit, whole


@dataclass
class Agreement:
    """What one rank knows once it has heard those it depends on."""

    hellos: dict[int, Hello] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    """Of the whole tensor; with the boxes, only where :meth:`Plan.needs_shapes` holds."""
    boxes: dict[Coordinate, Box] = field(default_factory=dict)
    """Of each cell of the source."""


def introduce(call: Call, text: str, plan: Plan, held: Tensor | None) -> tuple[Tensor | None, Agreement]:
    """Check what this rank holds and say so, or why not, to whoever depends on it.

    :param text: the call and its arguments, equal on all ranks.
    :raises Exception: what is wrong with ``held``, once it has been said.
    """
    if call.rank not in plan.cells:
        return None, Agreement()

    error: Exception | None = None
    try:
        held = checked(call.what, (plan.source, plan.target), held)
        hello = Hello.of(text, held)
    except Exception as failure:
        error, hello = failure, Hello.failed(text, failure)

    call.publish(hello_key(call.rank), hello.encode(), plan.heard_by(call.rank))
    if error is not None:
        raise error

    return held, Agreement({call.rank: hello})


def listen(call: Call, text: str, plan: Plan, known: Agreement) -> None:
    """Hear the others, and learn where the pieces lie.

    :raises CollectiveMismatchError: if the ranks called different things, or their pieces don't fit together.
    :raises Exception: what a rank raised that this one depends on.
    """
    error = _hear_all(call, text, plan, known)
    if error is None and plan.needs_shapes(call.rank):
        try:
            known.shape, known.boxes = _fitted(call, plan, known)
        except CollectiveMismatchError as misfit:
            error = misfit

    if error is not None:
        for key in _sent_already(call, text, plan, known):
            call.expect(key)

        call.release()
        raise error


def checked(what: str, sides: Sequence[Side], held: Tensor | None) -> Tensor:
    """What this rank holds, without its history.

    :param sides: the layouts that it has to have a place in.
    :raises ValueError: if it is missing, or a placement names a dimension that it has not.
    :raises UnsupportedTensorError: if it can't be carried, or has no such Partial.
    """
    if held is None:
        raise ValueError(f"{what}: it holds a part of the tensor, but passed None")

    held = plain_tensor(held)
    check_tensor(what, held)
    for side in sides:
        resolve(side.specs, side.mesh, held.shape, what)
        check_partial(side.specs, held.dtype, what)

    return held.detach()


def _hear_all(call: Call, text: str, plan: Plan, known: Agreement) -> Exception | None:
    error: Exception | None = None
    for rank in plan.hears(call.rank):
        try:
            with call.borrow(hello_key(rank)) as words:
                known.hellos[rank] = hello = Hello.decode(words)
        except DtorchError:
            if error is not None:
                break

            raise

        error = error or hello.refusal(call.what, rank, text)
        if error is not None and (plan.target.cuts or call.rank not in plan.places):
            break  # the others hear it too

    return error


def _sent_already(call: Call, text: str, plan: Plan, known: Agreement) -> list[Key]:
    """The keys that this rank has to read although it fails.

    Who only sends to an uncut target does so without knowing whether all pieces fit, unless it has heard of an error.
    """
    good = {rank for rank, hello in known.hellos.items() if hello.refusal("", rank, text) is None}
    heard_by_all = {rank for rank in plan.providers.values() if rank in plan.places}
    if plan.target.cuts or call.rank not in plan.readers or not heard_by_all <= good:
        return []

    return [
        data_key(rank, whole(known.hellos[rank].shape), plan.moved_to(known.hellos[rank].device_type, call.rank))
        for rank in plan.providers.values()
        if rank in good - heard_by_all and 0 not in known.hellos[rank].shape
    ]


def _fitted(call: Call, plan: Plan, known: Agreement) -> tuple[tuple[int, ...], dict[Coordinate, Box]]:
    holder = {
        cell: call.rank if call.rank in holders else plan.providers[cell] for cell, holders in plan.holders.items()
    }
    first = next(iter(holder.values()))
    for rank in holder.values():
        if known.hellos[rank].dtype != known.hellos[first].dtype:
            raise CollectiveMismatchError(
                f"{call.what}: rank {first} holds {known.hellos[first].dtype} and rank {rank} "
                f"{known.hellos[rank].dtype}; the parts of one tensor have one dtype"
            )

    shapes = {cell: known.hellos[rank].shape for cell, rank in holder.items()}
    specs = resolve(plan.source.specs, plan.source.mesh, known.hellos[first].shape, call.what)
    return fit(shapes, plan.source.mesh, specs, holder, call.what)
