"""Messages of any shape over a c10d process group.

A group that can receive without knowing the shape says so by having ``receive``; over any other one a header with
the shape goes first.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core._shapes import Shape, describe
from dtorch_core.errors import CollectiveMismatchError

_HEADER = 16
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


@runtime_checkable
class SupportsReceive(Protocol):
    """What a process group may offer besides c10d's methods."""

    def receive(self, src: int | None, tag: int, buffer: Tensor | None = None) -> Any:  # noqa: ANN401 - a c10d Work
        """A Work whose result is the next message of ``src``, whatever its shape, and that can be cancelled."""


def send(group: dist.ProcessGroup, tensor: Tensor, dst: int, tag: int) -> dist.Work:
    """Send a message that :func:`receive` understands."""
    if not isinstance(group, SupportsReceive):
        sizes = [*tensor.shape, *[0] * (_HEADER - 2 - tensor.dim())]
        header = torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *sizes], device=tensor.device)
        group.send([header], dst, tag).wait()

    return group.send([tensor.contiguous()], dst, tag)


def receive(group: dist.ProcessGroup, device: str, src: int | None, tag: int, out: Tensor | None) -> Any:  # noqa: ANN401
    """A Work whose result is the message."""
    if isinstance(group, SupportsReceive):
        return group.receive(src, tag, out)

    return _HeaderThenTensor(group, device, src, tag, out)


class _HeaderThenTensor:
    """Receives when it is waited for: the second receive needs the first one's shape."""

    def __init__(self, group: dist.ProcessGroup, device: str, src: int | None, tag: int, out: Tensor | None) -> None:
        self._group, self._src, self._tag, self._out = group, src, tag, out
        self._header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
        header = [self._header]
        self._pending = group.recv_anysource(header, tag) if src is None else group.recv(header, src, tag)
        self._message: Tensor | None = None

    def wait(self, timeout: timedelta) -> bool:
        if self._message is None:
            self._pending.wait(timeout)
            src = self._pending._source_rank() if self._src is None else self._src
            dtype, dims, *sizes = self._header.tolist()
            shape = Shape(_DTYPES[dtype], tuple(sizes[:dims]))
            message = shape.empty(self._header.device) if self._out is None else self._out
            if Shape.of(message) != shape:
                raise CollectiveMismatchError(f"recv: rank {src} sent {shape}, and out= is {describe(message)}")

            self._group.recv([message], src, self._tag).wait(timeout)
            self._message = message

        return True

    def result(self) -> list[Tensor | None]:
        return [self._message]

    def is_completed(self) -> bool:
        return self._message is not None

    def cancel(self) -> bool:
        """c10d has no way to take a receive back."""
        return False
