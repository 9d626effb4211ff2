"""Carries a tensor from one layout to another over a TensorStore.

First hellos, which are small. Then every rank publishes all that others need of it, reads what it needs, and waits
until its readers have finished. Publishing never waits, so no order of the ranks can lock them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from dtorch_core._copies import copy_into
from dtorch_core.errors import DtorchError
from dtorch_core.placement._agreement import Agreement, introduce, listen
from dtorch_core.placement._call import Call, Key, data_key
from dtorch_core.placement._mesh import Coordinate, Mesh
from dtorch_core.placement._placements import Spec, partial_op, resolve
from dtorch_core.placement._plan import Plan, Side, plan_of
from dtorch_core.placement._reduce import fill_neutral, reduce_into
from dtorch_core.placement._shards import Box, chunk_box, overlap, relative, shape_of, view, whole


def convert(call: Call, source: Side, target: Side, held: Tensor | None) -> Tensor | None:
    """This rank's part of the target, which the caller owns; None if it has none.

    :param held: this rank's part of the source. Not looked at on a rank that has none.
    """
    if call.rank not in source.mesh.ranks and call.rank not in target.mesh.ranks:
        return None

    plan = plan_of(source, target)
    text = f"{call.function} from {source} to {target}, on {', '.join(dict.fromkeys(target.devices))}"
    held, known = introduce(call, text, plan, held)
    listen(call, text, plan, known)
    _publish(call, plan, known, held)
    result = _receive(call, plan, known, held)
    call.finish()
    return result


def one_rank(call: Call, rank: int, name: str) -> Side:
    """The layout of a tensor that is whole on one rank; ``name`` is the argument's.

    :raises TypeError: if ``rank`` is not an int.
    :raises ValueError: if the store has no such rank.
    """
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"{call.what}: {name} must be a rank, an int, not {rank!r}")

    if not 0 <= rank < call.store.world_size:
        raise ValueError(f"{call.what}: {name}={rank}, but the store has rank 0 to rank {call.store.world_size - 1}")

    return Side(Mesh((1,), (rank,)), (Spec("Replicate"),), (call.store.topology[rank].device,))


def _publish(call: Call, plan: Plan, known: Agreement, held: Tensor | None) -> None:
    """Set each region that others read: once for all of its readers on one device."""
    if held is None:
        return

    mine = known.hellos[call.rank]
    readers: dict[tuple[Box, str], list[int]] = {}
    for reader in plan.served(call.rank):
        piece = box = whole(mine.shape)
        if plan.target.cuts:
            piece = known.boxes[plan.cells[call.rank]]
            box = _target_box(call, plan, known, reader)

        common = overlap(piece, box)
        if common is not None:
            device = plan.moved_to(mine.device_type, reader)
            readers.setdefault((relative(common, piece), device), []).append(reader)

    for (region, device), ranks in readers.items():
        call.publish(data_key(call.rank, region, device), view(held, region), ranks, device or None)


def _receive(call: Call, plan: Plan, known: Agreement, held: Tensor | None) -> Tensor | None:
    """Read this rank's part of the target."""
    if call.rank not in plan.places:
        return None

    box = _target_box(call, plan, known, call.rank)
    jobs = _jobs(call, plan, known, held, box) if call.rank in plan.readers else None
    try:
        dtype = next(iter(known.hellos.values())).dtype
        out = torch.empty(shape_of(box), dtype=dtype, device=plan.devices[call.rank])
        for region, parts in jobs or ():
            _read(call, view(out, region), parts, partial_op(plan.source.specs))

        if jobs is None:
            fill_neutral(out, partial_op(plan.target.specs) or "")
    except DtorchError:
        raise
    except Exception:
        call.release()
        raise

    return out


def _target_box(call: Call, plan: Plan, known: Agreement, rank: int) -> Box:
    mesh = plan.target.mesh
    specs = resolve(plan.target.specs, mesh, known.shape, call.what)
    return chunk_box(known.shape, mesh, specs, plan.places[rank])


def _jobs(
    call: Call, plan: Plan, known: Agreement, held: Tensor | None, box: Box
) -> list[tuple[Box, list[Tensor | Key]]]:
    """Each region of the result, and its contributions in mesh order: views of what is held here, or keys to read."""
    shards: dict[Coordinate, list[Coordinate]] = {}
    for cell in plan.holders:
        shards.setdefault(plan.source.shard(cell), []).append(cell)

    jobs: list[tuple[Box, list[Tensor | Key]]] = []
    for cells in shards.values():
        piece = known.boxes[cells[0]]
        common = overlap(piece, box)
        if common is not None:
            parts = [_part(call, plan, known, held, cell, relative(common, piece)) for cell in cells]
            jobs.append((relative(common, box), parts))

    # What is here first: it waits for nobody.
    return sorted(jobs, key=lambda job: any(isinstance(part, Key) for part in job[1]))


def _part(call: Call, plan: Plan, known: Agreement, held: Tensor | None, cell: Coordinate, region: Box) -> Tensor | Key:
    if held is not None and call.rank in plan.holders[cell]:
        return view(held, region)

    provider = plan.providers[cell]
    key = data_key(provider, region, plan.moved_to(known.hellos[provider].device_type, call.rank))
    call.expect(key)
    return key


def _read(call: Call, out: Tensor, parts: Sequence[Tensor | Key], op: str | None) -> None:
    with ExitStack() as borrows:
        tensors = [borrows.enter_context(call.borrow(part)) if isinstance(part, Key) else part for part in parts]
        if op is None:
            copy_into(out, tensors[0])
        else:
            reduce_into(out, tensors, op)
