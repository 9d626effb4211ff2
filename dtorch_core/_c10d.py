"""Calls a c10d process group's methods under the names, and with the layouts, that it takes.

Many groups read and write a tensor's memory as if it were contiguous, and are wrong in silence where it is not. A
group without :mod:`dtorch_core._extras` gets contiguous stand-ins instead, and results are copied to where they belong
when the Work is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dtorch_core import streams
from dtorch_core._extras import extras
from dtorch_core._text import seconds
from dtorch_core.errors import DtorchError, StoreTimeoutError

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
    opts = options("AllreduceOptions", timeout, op=op)
    return _called(group, timeout, lambda lay: group.allreduce([lay.both(tensor)], opts))


def reduce(group: dist.ProcessGroup, tensor: Tensor, op: str, root: int, timeout: float) -> dist.Work:
    opts = options("ReduceOptions", timeout, op=op, root=root)
    return _called(group, timeout, lambda lay: group.reduce([lay.both(tensor)], opts))


def broadcast(group: dist.ProcessGroup, tensor: Tensor, root: int, timeout: float) -> dist.Work:
    opts = options("BroadcastOptions", timeout, root=root)
    return _called(group, timeout, lambda lay: group.broadcast([lay.both(tensor)], opts))


def all_gather(group: dist.ProcessGroup, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> dist.Work:
    opts = options("AllgatherOptions", timeout)
    return _called(group, timeout, lambda lay: group.allgather([lay.outputs(outputs)], lay.inputs([tensor]), opts))


def reduce_scatter(
    group: dist.ProcessGroup, output: Tensor, inputs: Sequence[Tensor], op: str, timeout: float
) -> dist.Work:
    opts = options("ReduceScatterOptions", timeout, op=op)
    return _called(group, timeout, lambda lay: group.reduce_scatter(lay.outputs([output]), [lay.inputs(inputs)], opts))


def all_to_all(
    group: dist.ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
) -> dist.Work:
    opts = options("AllToAllOptions", timeout)
    try:
        return _called(group, timeout, lambda lay: group.alltoall(lay.outputs(outputs), lay.inputs(inputs), opts))
    except RuntimeError as error:  # c10d's own, raised before anything is sent
        if "does not support alltoall" not in str(error):
            raise

    return _all_to_all_single(group, outputs, inputs, timeout)


def _all_to_all_single(
    group: dist.ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
) -> dist.Work:
    """For groups that exchange parts of one tensor only, such as torch 2.11's Gloo."""
    exchange = getattr(group, "all_to_all_single", None) or group.alltoall_base  # the name up to torch 2.12
    stand_ins = _StandIns()
    given = torch.cat([tensor.view(-1) for tensor in stand_ins.inputs(inputs)])
    arriving, leaving = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
    work = exchange(stand_ins.joined(outputs), given, arriving, leaving, options("AllToAllOptions", timeout))
    return ForeignWork(work, timeout, stand_ins.cuda, stand_ins.pairs)  # type: ignore[return-value]


def gather(
    group: dist.ProcessGroup, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int, timeout: float
) -> dist.Work:
    opts = options("GatherOptions", timeout, root=root)
    return _called(
        group,
        timeout,
        lambda lay: group.gather([] if outputs is None else [lay.outputs(outputs)], lay.inputs([tensor]), opts),
    )


def scatter(
    group: dist.ProcessGroup, output: Tensor, inputs: Sequence[Tensor] | None, root: int, timeout: float
) -> dist.Work:
    opts = options("ScatterOptions", timeout, root=root)
    return _called(
        group,
        timeout,
        lambda lay: group.scatter(lay.outputs([output]), [] if inputs is None else [lay.inputs(inputs)], opts),
    )


def barrier(group: dist.ProcessGroup, timeout: float) -> dist.Work:
    return _called(group, timeout, lambda _: group.barrier(options("BarrierOptions", timeout)))


class _AsTheyAre:
    """For a group that takes any layout."""

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    outputs = inputs

    def both(self, tensor: Tensor) -> Tensor:
        return tensor


class _StandIns:
    """Contiguous tensors in the place of others, and where their values belong afterwards."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.cuda = False

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]

    def outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._instead(tensor) for tensor in tensors]

    def both(self, tensor: Tensor) -> Tensor:
        """For one that is read and written."""
        twin = self._instead(tensor)
        return twin if twin is tensor else twin.copy_(tensor)

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """One flat tensor for several that are written."""
        whole = torch.empty(sum(tensor.numel() for tensor in outputs), dtype=outputs[0].dtype, device=outputs[0].device)
        parts = whole.split([tensor.numel() for tensor in outputs])
        self.pairs += [(tensor, part.view(tensor.shape)) for tensor, part in zip(outputs, parts, strict=True)]
        self.cuda = self.cuda or whole.is_cuda
        return whole

    def _instead(self, tensor: Tensor) -> Tensor:
        self.cuda = self.cuda or tensor.is_cuda
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor

        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.pairs.append((tensor, twin))
        return twin


_AS_THEY_ARE = _AsTheyAre()
Layouts = _AsTheyAre | _StandIns


def _called(group: dist.ProcessGroup, timeout: float, call: Callable[[Layouts], dist.Work]) -> dist.Work:
    if extras(group) is not None:
        return call(_AS_THEY_ARE)

    stand_ins = _StandIns()
    work = call(stand_ins)
    # It has what is used of a Work.
    return ForeignWork(work, timeout, stand_ins.cuda, stand_ins.pairs)  # type: ignore[return-value]


class ForeignWork:
    """A Work of a group that is not ours: late is StoreTimeoutError, and results go to where they belong."""

    def __init__(
        self, work: dist.Work, timeout: float, cuda: bool, pairs: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._work, self._timeout, self._cuda, self._pairs = work, timeout, cuda, pairs
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._stored: list[torch.cuda.Event | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As c10d's; may be called again, from any stream."""
        began = self._began if timeout is None else time.monotonic()
        limit = self._timeout if timeout is None else timeout.total_seconds()
        try:
            if timeout is None or self._cuda:
                self._work.wait()  # with a time, NCCL's would block the host until the GPU is done
            else:
                self._work.wait(timeout)
        except DtorchError:
            raise
        except RuntimeError as error:
            # c10d has no error of its own for this, and its texts differ from group to group. Its clocks start earlier.
            if time.monotonic() - began < 0.9 * limit:
                raise

            raise StoreTimeoutError(f"not every rank had come after {seconds(limit)}: {error}") from error

        self._store()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Done when the results are where they belong."""

        def store(future: torch.futures.Future[Any]) -> Any:  # noqa: ANN401
            self._store()
            return future.value()

        return self._work.get_future().then(store)

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def _store(self) -> None:
        if not self._pairs:
            return

        with self._lock:
            if not self._stored:
                for target, twin in self._pairs:
                    target.copy_(twin)

                self._stored = [streams.record(target) for target, _ in self._pairs]
                return

        for event, (target, _) in zip(self._stored, self._pairs, strict=True):
            streams.order_after(event, target)
