"""The factory: torch's own process group over NCCL, and the companion that stands beside it."""

from __future__ import annotations

import threading
from functools import partial

import torch
import torch.distributed as dist

from dtorch_core import BackendContext, TensorStore, explain
from dtorch_core._extras import accompany
from dtorch_core._order import LaunchOrder
from dtorch_nccl_group import torch_nccl as nccl
from dtorch_nccl_group import traffic
from dtorch_nccl_group.companion import NcclCompanion
from dtorch_nccl_group.traffic import Communicator

_lock = threading.Lock()
_orders: dict[str, LaunchOrder] = {}


def open_process_group(ctx: BackendContext) -> dist.ProcessGroup:
    """A ``torch.distributed.ProcessGroup`` as torch makes it, connected, with this rank's device bound."""
    communicator = _communicator(ctx)
    stores = _stores(ctx)
    try:
        return _opened(ctx, communicator, stores)
    except BaseException as error:
        for store in stores or ():
            store.abort(f"rank {ctx.rank} failed: {type(error).__name__}: {error}", died=True)
            store.close()

        raise


def _opened(
    ctx: BackendContext,
    communicator: Communicator | None,
    stores: tuple[TensorStore, TensorStore] | None,
) -> dist.ProcessGroup:
    device = torch.device(ctx.device)
    line = dist.PrefixStore("nccl", ctx.rendezvous)
    made = communicator.backends.get(ctx.rank) if communicator is not None else None
    is_connected = made is not None
    if made is None:
        made = nccl.backend(line, ctx.rank, ctx.world_size, ctx.timeout, ctx.name, shared=_is_shared(ctx))

    group = dist.ProcessGroup(line, ctx.rank, ctx.world_size)
    if device.index is not None:
        group.bound_device_id = device

    group._register_backend(torch.device(nccl.DEVICE_TYPE), nccl.KIND, made)
    group._set_default_backend(nccl.KIND)
    beside = NcclCompanion(
        ctx,
        stores,
        group,
        made,
        _order(ctx),
        communicator=communicator,
        finish=partial(nccl.finish, device) if nccl.QUEUED else None,
        reap=nccl.reap,
        limit=partial(nccl.limit, made),
    )
    accompany(group, beside)
    if is_connected:
        nccl.limit(made, ctx.timeout)
        return group

    try:
        with traffic.HERE.making(ctx.timeout):
            nccl.connect(made, device, ctx.timeout)

    except Exception as error:
        beside.abort(f"rank {ctx.rank} could not connect: {error}", died=True)
        raise beside.explain("connecting", error) from error

    if communicator is not None:
        communicator.backends[ctx.rank] = made

    return group


def _communicator(ctx: BackendContext) -> Communicator | None:
    """None where ranks are in several processes: these can't see which ones of the others are free."""
    if ctx.world_size == 1 or len(ctx.topology.by_process()) > 1:
        return None

    devices = tuple(ctx.topology[rank].device for rank in range(ctx.world_size))
    return traffic.HERE.take(devices, ctx.token, ctx.rank)


def _is_shared(ctx: BackendContext) -> bool:
    """This process has several ranks of the group, or may have several of the next one."""
    return ctx.world_size == 1 or len(ctx.topology.by_process()[ctx.topology[ctx.rank].process]) > 1


def _stores(ctx: BackendContext) -> tuple[TensorStore, TensorStore] | None:
    """Two over the same ranks; none across hosts, unless a backend reaches there. Every rank sees the same topology.

    :raises NoBackendError: on one host, if the store backend for these ranks is not installed; with the pip command.
    """
    if not ctx.topology.same_host and explain("store", ctx.topology).chosen is None:
        return None

    return ctx.open_store("exchange"), ctx.open_store("control")


def _order(ctx: BackendContext) -> LaunchOrder:
    """One for all groups of a GPU: their kernels wait for each other's ends as well."""
    if ctx.device == "cpu":
        return LaunchOrder()  # of Gloo in NCCL's place

    with _lock:
        return _orders.setdefault(ctx.device, LaunchOrder())
