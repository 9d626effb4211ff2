"""What one process tells another about a CUDA tensor, so that it can use the same memory."""

from __future__ import annotations

import marshal
import os
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtorch_file_store.tensors import Layout, read

_FORMAT = 2
"""Of marshal: equal tickets are equal bytes. Later ones are written by who else refers to a part."""

_process = (0, "")


class Ticket(NamedTuple):
    """Where a tensor lies, and how it is laid out there."""

    owner: str
    """The process whose memory it is, as :func:`this_process` names it there."""
    device: str
    """The device's UUID."""
    allocation: int
    """The owner's number for the allocation; 0 for a tensor without bytes."""
    handle: str
    """The allocation's interprocess handle, hexadecimal; empty for a tensor without bytes."""
    offset: int
    """Bytes from the begin of the allocation to the tensor's first element."""
    layout: Layout
    conjugate: bool
    negative: bool

    def to_json(self) -> tuple[Any, ...]:
        """Plain tuples, strings and numbers."""
        return (*self[:5], self.layout.to_json(), self.conjugate, self.negative)

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Ticket:
        """What :meth:`to_json` gave, perhaps in another process."""
        owner, device, allocation, handle, offset, layout, conjugate, negative = values
        return cls(owner, device, allocation, handle, offset, Layout.from_json(layout), conjugate, negative)

    def pack(self) -> bytes:
        """What travels, and what it is known by: made once, and read once, though it is sent again and again."""
        return marshal.dumps(self.to_json(), _FORMAT)

    @classmethod
    def unpack(cls, said: bytes) -> Ticket:
        """What :meth:`pack` gave, perhaps in another process. As in messages, whoever says it is trusted."""
        return cls.from_json(marshal.loads(said))

    def over(self, memory: Tensor) -> Tensor:
        """The tensor that lies in ``memory``: ``uint8``, exactly the bytes that it addresses.

        :raises UnsupportedTensorError: if this torch has no such dtype.
        """
        tensor = read(self.layout, memory)
        if self.conjugate:
            tensor = tensor.conj()

        return torch._neg_view(tensor) if self.negative else tensor


def this_process() -> str:
    """A name that no other process has, in whatever container it runs."""
    global _process
    pid = os.getpid()
    if _process[0] != pid:  # also after a fork
        _process = (pid, secrets.token_hex(8))

    return _process[1]
