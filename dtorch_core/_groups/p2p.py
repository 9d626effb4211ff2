"""Messages of any shape over a c10d process group.

A group that can receive without knowing the shape does so, or who stands beside it (see
:mod:`dtorch_core.extras`); over any other one a header with the shape goes first.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core._copies import copy_into, plain
from dtorch_core._futures import future_of
from dtorch_core._groups.foreign_work import ForeignWork
from dtorch_core._groups.stand_ins import as_carried
from dtorch_core._shapes import Shape, describe
from dtorch_core.errors import CollectiveMismatchError
from dtorch_core.extras import Companion, extras

_HEADER = 66
"""Numbers in a header: dtype, dims, and as many sizes as a tensor can have."""

_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def send(
    group: dist.ProcessGroup, beside: Companion | None, tensor: Tensor, dst: int, tag: int, timeout: float
) -> dist.Work:
    """Send a message that :func:`receive` understands."""
    if extras(group) is not None:
        return group.send([tensor], dst, tag)

    if beside is not None and beside.carries(dst):
        work: dist.Work = beside.send(tensor, dst, tag)
        return work

    whole = plain(tensor)
    sizes = [*whole.shape, *[0] * (_HEADER - 2 - whole.dim())]
    header = torch.tensor([_DTYPES.index(whole.dtype), whole.dim(), *sizes], device=whole.device)
    ForeignWork(group.send([header], dst, tag), timeout, tensor.is_cuda).wait()
    return ForeignWork(group.send([as_carried(whole)], dst, tag), timeout, tensor.is_cuda)  # type: ignore[return-value]


def receive(
    group: dist.ProcessGroup,
    beside: Companion | None,
    device: str,
    src: int | None,
    tag: int,
    out: Tensor | None,
    timeout: float,
) -> Any:  # noqa: ANN401
    """A Work whose result is the message."""
    own = extras(group)
    if own is not None:
        return own.receive(src, tag, out)

    if beside is not None and beside.carries(src):
        return beside.receive(src, tag, out)

    return _HeaderThenTensor(group, device, src, tag, out, timeout)


class _HeaderThenTensor:
    """Receives when it is waited for: the second receive needs the first one's shape."""

    def __init__(
        self, group: dist.ProcessGroup, device: str, src: int | None, tag: int, out: Tensor | None, timeout: float
    ) -> None:
        self._group, self._src, self._tag, self._out, self._timeout = group, src, tag, out, timeout
        self._header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
        header = [self._header]
        pending = group.recv_anysource(header, tag) if src is None else group.recv(header, src, tag)
        self._pending = ForeignWork(pending, timeout, self._header.is_cuda)
        self._lock = threading.Lock()
        self._coming: tuple[int, Shape] | None = None
        self._message: Tensor | None = None
        self._result: Tensor | None = None

    def wait(self, timeout: timedelta) -> bool:
        with self._lock:
            if self._result is None:
                self._result = self._received(timeout)

        return True

    def result(self) -> list[Tensor | None]:
        return [self._result]

    def is_completed(self) -> bool:
        return self._result is not None

    def get_future(self) -> torch.futures.Future[list[Tensor | None]]:
        """Done when a thread of its own has waited."""

        def received() -> list[Tensor | None]:
            self.wait(timedelta(seconds=self._timeout))
            return self.result()

        return future_of(received, f"receives from {self._src}", [self._header.device] if self._header.is_cuda else ())

    def cancel(self) -> bool:
        """c10d has no way to take a receive back."""
        return False

    def _received(self, timeout: timedelta) -> Tensor:
        if self._coming is None:
            self._pending.wait(timeout)
            dtype, dims, *sizes = self._header.tolist()
            src = self._pending._source_rank() if self._src is None else self._src
            self._coming = src, Shape(_DTYPES[dtype], tuple(sizes[:dims]))

        src, shape = self._coming
        if self._message is None:
            message = shape.empty(self._header.device)
            pending = self._group.recv([as_carried(message)], src, self._tag)
            ForeignWork(pending, self._timeout, message.is_cuda).wait(timeout)
            self._message = message

        if self._out is None:
            return self._message

        # Only now: a message that does not fit is out of the way of the next one.
        if Shape.of(self._out) != shape:
            raise CollectiveMismatchError(f"recv: rank {src} sent {shape}, and out= is {describe(self._out)}")

        copy_into(self._out.detach(), self._message)
        return self._out
