"""Shapes as ranks tell them to each other, and whether they fit together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtorch_core._text import rank_list
from dtorch_core.errors import CollectiveMismatchError, UnsupportedTensorError


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor's dtype and sizes."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tensor.dtype, tuple(tensor.shape))

    @classmethod
    def from_json(cls, fields: tuple[str, list[int]]) -> Shape:
        return cls(getattr(torch, fields[0]), tuple(fields[1]))

    def to_json(self) -> tuple[str, list[int]]:
        return str(self.dtype).removeprefix("torch."), list(self.sizes)

    def empty(self, device: torch.device) -> Tensor:
        """Uninitialised memory for it."""
        return torch.empty(self.sizes, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.sizes)}"


def write(tensors: Sequence[Tensor]) -> str:
    """The shapes of tensors as one text."""
    return json.dumps([Shape.of(tensor).to_json() for tensor in tensors])


def read(texts: Sequence[str]) -> list[list[Shape]]:
    """Each rank's shapes."""
    return [[Shape.from_json(fields) for fields in json.loads(text)] for text in texts]


def describe(tensor: Tensor) -> str:
    """``float32[2, 3]``."""
    return str(Shape.of(tensor)) if isinstance(tensor, Tensor) else type(tensor).__name__


def own_dim(dim: int, tensor: Tensor) -> int:
    """``dim`` counted from the front.

    :raises ValueError: if the tensor has no such dim.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim {dim} is not one of the {tensor.dim()} of {describe(tensor)}")

    return dim % tensor.dim()


def chunk_sizes(size: int, parts: int) -> list[int]:
    """What ``torch.chunk`` gives, with empty chunks at the end where it gives fewer."""
    full = -(-size // parts)
    return [max(0, min(full, size - part * full)) for part in range(parts)]


def joined(label: str, shapes: Sequence[Shape], dim: int) -> list[int]:
    """The sizes of all ranks' tensors put together along ``dim``.

    :raises CollectiveMismatchError: if they differ in more than their size along ``dim``; the odd ranks are named.
    """

    def rest(shape: Shape) -> object:
        return shape.dtype, len(shape.sizes), shape.sizes[:dim], shape.sizes[dim + 1 :]

    check_alike(label, shapes, rest, f"they may differ along dim {dim} only")
    whole = list(shapes[0].sizes)
    whole[dim] = sum(shape.sizes[dim] for shape in shapes)
    return whole


def check_alike(label: str, shapes: Sequence[Shape], key: Callable[[Shape], object], rule: str) -> None:
    """Every rank's shape has the same ``key``.

    :raises CollectiveMismatchError: if not; the odd ranks are named.
    """
    keys = [key(shape) for shape in shapes]
    if len(set(keys)) == 1:
        return

    (usual, often), *_ = Counter(keys).most_common()
    odd = [rank for rank, found in enumerate(keys) if found != usual]
    who = f"{rank_list(odd)} does not fit the others" if often > len(odd) else "the ranks' tensors do not fit"
    table = "\n".join(f"  rank {rank}: {shape}" for rank, shape in enumerate(shapes))
    raise CollectiveMismatchError(f"{label}: {who}; {rule}\n{table}")


def result_memory(call: str, out: Tensor | None, like: Tensor, sizes: Sequence[int]) -> Tensor:
    """Memory for a result: ``out`` if it fits, else new.

    :raises UnsupportedTensorError: if ``out`` has another shape, dtype or device.
    """
    if out is None:
        return torch.empty(tuple(sizes), dtype=like.dtype, device=like.device)

    if tuple(out.shape) != tuple(sizes) or out.dtype != like.dtype or out.device != like.device:
        wanted = Shape(like.dtype, tuple(sizes))
        raise UnsupportedTensorError(
            f"{call}: out= is {describe(out)} on {out.device}, the result is {wanted} on {like.device}"
        )

    return out.detach()
