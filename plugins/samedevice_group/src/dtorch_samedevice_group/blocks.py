"""Cuts tensors into blocks that stay in cache, so that several ranks' threads can share one large operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from dtorch_core._memory import same_place

BLOCK_BYTES = 256 * 1024
"""What one task reads of each tensor. Measured: from 64 KiB to 512 KiB are alike, larger ones leave the cache."""

Task = Callable[[], None]


def plain(tensor: Tensor) -> bool:
    """It can be cut: contiguous memory, and its values are the bytes (no conjugate or negative bit)."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def cut(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]] | None:
    """The blocks of tensors of one shape: one entry a block, with that block of each.

    None where it does not pay or can't be done: small tensors, CUDA tensors, strided ones.
    """
    first = tensors[0]
    if first.nbytes <= BLOCK_BYTES or first.is_cuda or not all(plain(tensor) for tensor in tensors):
        return None

    length = BLOCK_BYTES // first.element_size()
    return list(zip(*(tensor.view(-1).split(length) for tensor in tensors), strict=True))


def copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Task]:
    """Tasks that copy each source to its target, ``(target, source)``; large ones in blocks."""
    tasks: list[Task] = []
    for target, source in pairs:
        if same_place(target, source):
            continue

        blocks = cut((target, source))
        tasks += [partial(_copy, block[0], block[1]) for block in blocks or [(target, source)]]

    return tasks


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
