"""Memory for results, new or what the caller gave as ``out``; and where the memory of a tensor lies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dtorch_core import streams
from dtorch_core._copies import copy_into
from dtorch_core._shapes import Shape, describe
from dtorch_core._text import size_text
from dtorch_core.checks import check_written, plain_tensor
from dtorch_core.errors import NoRoomError, UnsupportedTensorError


class Memory:
    """Where a collective writes its result. Not ``out`` itself if that would overwrite what is still to be read."""

    def __init__(
        self,
        label: str,
        out: Tensor | None,
        shape: Shape,
        device: torch.device,
        reads: Sequence[Tensor] = (),
    ) -> None:
        """
        :param reads: this rank's inputs, which its peers may still read when the first results are written.
        :raises UnsupportedTensorError: if ``out`` has another shape, dtype or device.
        """
        self._given = out
        if out is not None:
            out = plain_tensor(out)
            _check_out(label, out, shape, device)

        self._out = out
        self._stored: list[torch.cuda.Event | None] = []
        self._direct = out is not None and not any(_overlap(out, tensor) for tensor in reads)
        self.tensor = out.detach() if out is not None and self._direct else shape.empty(device)

    @classmethod
    def holding(cls, label: str, out: Tensor | None, x: Tensor) -> Memory:
        """Memory that holds ``x``'s values and will hold the result."""
        in_place = isinstance(out, Tensor) and same_place(plain_tensor(out), x)
        memory = cls(label, out, Shape.of(x), x.device, () if in_place else (x,))
        if not in_place:
            copy_into(memory.tensor, x.detach())

        return memory

    def result(self) -> Tensor:
        """What the caller gets, once the collective is done: ``out``, or new memory. May be called again."""
        if self._out is None or self._given is None:
            return self.tensor

        if not self._direct:
            if not self._stored:
                copy_into(self._out.detach(), self.tensor)
                self._stored.append(streams.record(self._out))
            else:
                streams.order_after(self._stored[0], self._out)

        return self._given


def fresh(call: str, size: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Uninitialised memory for :meth:`TensorStore.empty`; ``call`` opens the message.

    :raises NoRoomError: if the CPU has no room for it. (A GPU's allocator says so itself, in an error of torch's.)
    """
    try:
        return torch.empty(size, dtype=dtype, device=device)
    except RuntimeError as error:
        if torch.device(device).type != "cpu":
            raise

        wanted = size_text(math.prod(size) * dtype.itemsize)
        raise NoRoomError(
            f"{call}: no memory for {wanted} on the CPU: {str(error).splitlines()[0]}. Ask for less at a time, or free "
            f"memory"
        ) from error


def same_place(a: Tensor, b: Tensor) -> bool:
    """They are one view of one memory."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """They may have an element's memory in common: what lies between their first and last bytes meets.

    Two storages may be of one memory: see :func:`own_bytes`.
    """
    (a_start, a_end), (b_start, b_end) = span(a), span(b)
    return max(a_start, b_start) < min(a_end, b_end)


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first byte, and behind its last one; equal where it is empty."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes

    return start, start + (extent(tensor) if tensor.numel() else 0)


def extent(tensor: Tensor) -> int:
    """How many bytes lie from its first element to the end of its last one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def own_bytes(tensor: Tensor) -> Tensor:
    """The same memory of a CPU tensor through a storage of just the bytes that the view addresses."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes and tensor.is_contiguous():
        return tensor

    start = tensor.storage_offset() * tensor.element_size()
    end = start + (extent(tensor) if tensor.numel() else 0)
    view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage[start:end], 0, tensor.shape, tensor.stride())
    # The conjugate and negative bits are of the view, not of the bytes.
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def _check_out(label: str, out: Tensor, shape: Shape, device: torch.device) -> None:
    check_written(f"{label}, out=", out)
    if Shape.of(out) != shape or out.device != device:
        raise UnsupportedTensorError(
            f"{label}: out= is {describe(out)} on {out.device}, the result is {shape} on {device}"
        )
