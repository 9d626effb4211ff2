"""Shapes as ranks tell them to each other, and whether they fit together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtorch_core._text import rank_list
from dtorch_core.errors import CollectiveMismatchError


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
        return f"{str(self.dtype)[6:]}{list(self.sizes)}"  # without "torch."


def write(tensors: Sequence[Tensor]) -> str:
    """The shapes of tensors as one text."""
    return json.dumps([Shape.of(tensor).to_json() for tensor in tensors])


def read(texts: Sequence[str]) -> list[list[Shape]]:
    """Each rank's shapes."""
    return [[Shape.from_json(fields) for fields in json.loads(text)] for text in texts]


def describe(tensor: object) -> str:
    """``float32[2, 3]``; the type of what is no tensor."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__

    shape = "[nested]" if tensor.is_nested else list(tensor.shape)  # those that are nested have no sizes
    return f"{str(tensor.dtype)[6:]}{shape}"


def describe_all(tensors: object) -> str:
    """``float32[2], float32[3]``; several alike as ``3 x float32[2]``."""
    if not isinstance(tensors, Sequence):
        return describe(tensors)

    texts = [describe(tensor) for tensor in tensors]
    return f"{len(texts)} x {texts[0]}" if len(texts) > 1 and len(set(texts)) == 1 else ", ".join(texts)


def own_dim(label: str, dim: int, tensor: Tensor) -> int:
    """``dim`` counted from the front.

    :raises ValueError: if the tensor has no such dim.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{label}: a dim is an int, not {dim!r}")

    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{label}: dim {dim} is not one of the {tensor.dim()} of {describe(tensor)}")

    return dim % tensor.dim()


def chunk_sizes(size: int, parts: int) -> list[int]:
    """What ``torch.chunk`` gives, with empty chunks at the end where it gives fewer."""
    full = -(-size // parts)
    return [max(0, min(full, size - part * full)) for part in range(parts)]


def chunks(tensor: Tensor, dim: int, parts: int) -> list[Tensor]:
    """The tensor in chunks of those sizes."""
    return list(tensor.detach().split(chunk_sizes(tensor.shape[dim], parts), dim))


def joined(label: str, shapes: Sequence[Shape], dim: int) -> Shape:
    """The shape of all ranks' tensors put together along ``dim``.

    :raises CollectiveMismatchError: if they differ in more than their size along ``dim``; the odd ranks are named.
    """

    rests = [(shape.dtype, len(shape.sizes), shape.sizes[:dim], shape.sizes[dim + 1 :]) for shape in shapes]
    _check_alike(label, rests, shapes, f"they may differ along dim {dim} only")
    sizes = list(shapes[0].sizes)
    sizes[dim] = sum(shape.sizes[dim] for shape in shapes)
    return Shape(shapes[0].dtype, tuple(sizes))


def one_dtype(label: str, shapes: Sequence[Shape]) -> None:
    """All ranks' tensors have one dtype.

    :raises CollectiveMismatchError: if not; the odd ranks are named.
    """
    _check_alike(label, [shape.dtype for shape in shapes], shapes, "they must have one dtype")


def _check_alike(label: str, keys: Sequence[object], shapes: Sequence[Shape], rule: str) -> None:
    if len(set(keys)) == 1:
        return

    (usual, often), *_ = Counter(keys).most_common()
    odd = [rank for rank, key in enumerate(keys) if key != usual]
    who = f"unlike the others: {rank_list(odd)}" if often > len(odd) else "the ranks' tensors do not fit"
    table = "\n".join(f"  rank {rank}: {shape}" for rank, shape in enumerate(shapes))
    raise CollectiveMismatchError(f"{label}: {who}; {rule}\n{table}")
