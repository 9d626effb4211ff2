"""Tensors of every dtype and layout, with values that tell where they belong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtorch_core.testing._group_base import all_dtypes

DTYPES = all_dtypes()


def of_dtype(dtype: torch.dtype, device: str) -> Tensor:
    """Six elements whose bytes count up: right for a dtype that has no arithmetic, too."""
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).to(device).view(dtype)


_base = torch.arange(120, dtype=torch.float32)
COMPLEX = torch.complex(_base, _base + 500)

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "0-dim": lambda: _base[7],
    "one element": lambda: _base[5:6],
    "empty": lambda: _base[:0],
    "empty with a shape": lambda: torch.empty(3, 0, 2),
    "slice of a large storage": lambda: _base[40:46],
    "every second": lambda: _base[1:100:2],
    "columns": lambda: _base.reshape(10, 12)[2:8, 3:7],
    "transposed": lambda: _base.reshape(10, 12).t(),
    "permuted": lambda: _base.reshape(4, 5, 6).permute(2, 0, 1),
    "channels last": lambda: _base.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: _base[3:6].reshape(3, 1).expand(3, 4),
    "expanded scalar": lambda: _base[9].expand(2, 3),
    "overlapping": lambda: _base.as_strided((4, 3), (1, 1), 11),
    "conjugate": lambda: COMPLEX[3:9].conj(),
    "conjugate and strided": lambda: COMPLEX.reshape(10, 12).t()[1:4].conj(),
    "negative": lambda: COMPLEX[3:9].conj().imag,
    "conjugate 0-dim": lambda: COMPLEX[3].conj(),
    "conjugate and negative": lambda: torch._neg_view(COMPLEX[3:9].conj()),
}


def moved(view: Tensor, device: str) -> Tensor:
    """The same view, of a copy of its whole storage on ``device``."""
    if device == "cpu":
        return view

    whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(device)
    moved: Tensor = whole.as_strided(view.shape, view.stride(), view.storage_offset())
    moved = moved.conj() if view.is_conj() else moved
    return torch._neg_view(moved) if view.is_neg() else moved
