"""The factory: torch's own process group over NCCL, and the companion that stands beside it."""

from __future__ import annotations

import threading
from functools import partial

import torch
import torch.distributed as dist

from dtorch_core import BackendContext, TensorStore, explain
from dtorch_core._groups.order import LaunchOrder
from dtorch_core.extras import accompany
from dtorch_nccl_group import torch_nccl as nccl
from dtorch_nccl_group import traffic
from dtorch_nccl_group.companion import NcclCompanion

_lock = threading.Lock()
_orders: dict[str, LaunchOrder] = {}


def open_process_group(ctx: BackendContext) -> dist.ProcessGroup:
    """A ``torch.distributed.ProcessGroup`` as torch makes it, connected, with this rank's device bound."""
    stores = _stores(ctx)
    try:
        return _opened(ctx, stores)
    except BaseException as error:
        for store in stores or ():
            store.abort(f"rank {ctx.rank} failed: {type(error).__name__}: {error}", died=True)
            store.close()

        raise


def _opened(ctx: BackendContext, stores: tuple[TensorStore, TensorStore] | None) -> dist.ProcessGroup:
    device = torch.device(ctx.device)
    line = dist.PrefixStore("nccl", ctx.rendezvous)
    shared = traffic.may_be_shared(ctx)
    made = nccl.backend(line, ctx.rank, ctx.world_size, ctx.timeout, ctx.name, shared=shared)
    group = dist.ProcessGroup(line, ctx.rank, ctx.world_size)
    finish = partial(nccl.finish, device) if nccl.QUEUED else None
    if device.index is not None:
        group.bound_device_id = device

    group._register_backend(torch.device(nccl.DEVICE_TYPE), nccl.KIND, made)
    group._set_default_backend(nccl.KIND)
    beside = NcclCompanion(ctx, stores, group, made, _order(ctx), finish=finish, limit=nccl.limit)
    accompany(group, beside)
    try:
        with traffic.HERE.making(ctx.timeout):
            nccl.connect(made, device, ctx.timeout)

    except Exception as error:
        beside.abort(f"rank {ctx.rank} could not connect: {error}", died=True)
        raise beside.explain("connecting", error) from error

    return group


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
