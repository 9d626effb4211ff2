"""What a rank that holds a part of a tensor says before it sends it: what it holds, or why it can't go on.

It travels as JSON, through a store in a small tensor. Nothing in it is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from dtorch_core import errors
from dtorch_core.errors import CollectiveMismatchError, DtorchError, ProtocolError


@dataclass(frozen=True, slots=True)
class Hello:
    """One rank's part."""

    call: str
    """The function and its arguments, as far as all ranks must agree on them."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    error: tuple[str, str] | None = None
    """Type and message of what this rank raised instead of sending."""

    @classmethod
    def of(cls, call: str, tensor: Tensor) -> Hello:
        """What there is to say of a good tensor."""
        return cls(call, tuple(tensor.shape), tensor.dtype, tensor.device.type)

    @classmethod
    def failed(cls, call: str, error: Exception) -> Hello:
        """What there is to say where there is none."""
        return cls(call, (), torch.uint8, "cpu", (type(error).__name__, str(error)))

    def to_json(self) -> str:
        """As text."""
        return json.dumps(
            [self.call, self.shape, str(self.dtype).removeprefix("torch."), self.device_type, self.error]
        )

    @classmethod
    def from_json(cls, text: str) -> Hello:
        """The inverse of :meth:`to_json`."""
        call, shape, name, device_type, error = json.loads(text)
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ProtocolError(f"a peer holds a tensor of dtype {name!r}; this torch ({torch.__version__}) has none")

        return cls(call, tuple(shape), dtype, device_type, (error[0], error[1]) if error else None)

    def encode(self) -> Tensor:
        """As a tensor."""
        return torch.frombuffer(bytearray(self.to_json().encode()), dtype=torch.uint8)

    @classmethod
    def decode(cls, tensor: Tensor) -> Hello:
        """The inverse of :meth:`encode`."""
        return cls.from_json(bytes(tensor.tolist()).decode())

    def refusal(self, what: str, rank: int, call: str) -> Exception | None:
        """Why a rank that calls ``call`` can't go on with ``rank``, whose hello this is; None if it can."""
        if self.call != call:
            return CollectiveMismatchError(
                f"{what}: the ranks called different things; this rank: {call}; rank {rank}: {self.call}"
            )

        if self.error is None:
            return None

        name, text = self.error
        kind = {"TypeError": TypeError, "ValueError": ValueError}.get(name) or getattr(errors, name, None)
        if not isinstance(kind, type) or not issubclass(kind, (DtorchError, TypeError, ValueError)):
            kind = DtorchError

        return kind(f"{what}: rank {rank} has raised {name}: {text}")
