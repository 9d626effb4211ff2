"""Calls a c10d process group's methods under the names that the installed torch, or the group, has for them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
"""ThreadGroup's words for c10d's reduce ops."""


def options(
    name: str, timeout: float, *, op: str | None = None, root: int | None = None
) -> Any:  # noqa: ANN401 - c10d's option classes share no base
    """``AllreduceOptions`` and its like. torch.distributed does not export all of them."""
    opts = getattr(distributed_c10d, name)()
    opts.timeout = timedelta(seconds=timeout)
    if op is not None:
        opts.reduceOp = OPS[op]

    if root is not None:
        opts.rootRank = root

    return opts


def all_reduce(group: dist.ProcessGroup, tensor: Tensor, op: str, timeout: float) -> dist.Work:
    return group.allreduce([tensor], options("AllreduceOptions", timeout, op=op))


def reduce(group: dist.ProcessGroup, tensor: Tensor, op: str, root: int, timeout: float) -> dist.Work:
    return group.reduce([tensor], options("ReduceOptions", timeout, op=op, root=root))


def broadcast(group: dist.ProcessGroup, tensor: Tensor, root: int, timeout: float) -> dist.Work:
    return group.broadcast([tensor], options("BroadcastOptions", timeout, root=root))


def all_gather(group: dist.ProcessGroup, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> dist.Work:
    return group.allgather([list(outputs)], [tensor], options("AllgatherOptions", timeout))


def reduce_scatter(
    group: dist.ProcessGroup, output: Tensor, inputs: Sequence[Tensor], op: str, timeout: float
) -> dist.Work:
    return group.reduce_scatter([output], [list(inputs)], options("ReduceScatterOptions", timeout, op=op))


def all_to_all(
    group: dist.ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
) -> dist.Work:
    return group.alltoall(list(outputs), list(inputs), options("AllToAllOptions", timeout))


def gather(
    group: dist.ProcessGroup, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int, timeout: float
) -> dist.Work:
    lists = [] if outputs is None else [list(outputs)]
    return group.gather(lists, [tensor], options("GatherOptions", timeout, root=root))


def scatter(
    group: dist.ProcessGroup, output: Tensor, inputs: Sequence[Tensor] | None, root: int, timeout: float
) -> dist.Work:
    lists = [] if inputs is None else [list(inputs)]
    return group.scatter([output], lists, options("ScatterOptions", timeout, root=root))


def barrier(group: dist.ProcessGroup, timeout: float) -> dist.Work:
    return group.barrier(options("BarrierOptions", timeout))
