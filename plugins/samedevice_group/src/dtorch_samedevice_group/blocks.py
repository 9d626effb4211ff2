"""Does small work at once, and cuts large work into blocks that several ranks' threads can share.

A block stays in cache while all ranks' parts of it are worked on. It is not smaller than that takes: between two blocks
a thread needs the GIL, and may have to wait until another one lets it go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dtorch_core._copies import copy_into
from dtorch_core._memory import same_place

BLOCK_BYTES = 512 * 1024
"""What one task handles of each tensor. Measured: from 256 KiB to 2 MiB are alike, larger ones leave the cache."""

COPY_BYTES = 2 * 1024 * 1024
"""The same for copies, of which little is read twice: fewer waits for the GIL count for more."""

ALONE_BYTES = 8 * 1024 * 1024
"""Work that moves fewer bytes is not shared: waking another thread would take as long as its share of the work."""

Task = Callable[[], None]

Job = Sequence[Tensor]
"""Tensors of one shape that are worked on together, element by element."""

Tensors = list[Tensor] | tuple[Tensor, ...]


_inference = getattr(torch._C, "_InferenceMode", torch.inference_mode)
"""Tensors made in inference mode can be written in it alone, others in it too; and it records no gradients.

Without torch's wrapper, which costs as much as a small copy.
"""


def share(jobs: Sequence[Job], do: Callable[[Job], None], block_bytes: int = BLOCK_BYTES) -> Sequence[Task]:
    """Do the jobs at once, or, where there is much to do, return them as tasks that may run in any order.

    ``do`` is given whole jobs, or the same block of each of a job's tensors.
    """
    nbytes = len(jobs[0]) * jobs[0][0].nbytes if len(jobs) == 1 else sum([len(job) * job[0].nbytes for job in jobs])
    if nbytes > ALONE_BYTES:
        return [partial(_do, do, block) for job in jobs for block in cut(job, block_bytes) or [job]]

    with _inference(True):
        for job in jobs:
            do(job)

    return ()


def copies(targets: Tensors, sources: Tensors) -> Sequence[Task]:
    """Copy each source to its target, as :func:`share` does jobs."""
    if sum([target.nbytes for target in targets]) <= ALONE_BYTES // 2 and targets and targets[0].is_cpu:
        with _inference(True):
            try:
                torch._foreach_copy_(targets, sources)  # one call: each lets the GIL go, and has to get it back
            except RuntimeError:  # it takes no conjugate and negative views as targets, and not every dtype
                for target, source in zip(targets, sources, strict=True):
                    copy_into(target, source)

        return ()

    # What goes to several targets is read from memory once.
    jobs: dict[int, list[Tensor]] = {}
    for target, source in zip(targets, sources, strict=True):
        if not same_place(target, source):
            jobs.setdefault(id(source), [source]).append(target)

    return share(list(jobs.values()), _copy, COPY_BYTES)


def cut(tensors: Job, block_bytes: int) -> list[Job] | None:
    """The blocks of tensors of one shape: one entry a block, with that block of each.

    None where it does not pay or can't be done: small tensors, CUDA tensors, strided ones.
    """
    first = tensors[0]
    if first.nbytes <= block_bytes or first.is_cuda or not all(plain(tensor) for tensor in tensors):
        return None

    length = block_bytes // first.element_size()
    return list(zip(*(tensor.view(-1).split(length) for tensor in tensors), strict=True))


def plain(tensor: Tensor) -> bool:
    """It can be cut: contiguous memory, and its values are the bytes (no conjugate or negative bit)."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _do(do: Callable[[Job], None], job: Job) -> None:
    with _inference(True):
        do(job)


def _copy(job: Job) -> None:
    source = job[0]
    for target in job[1:]:
        copy_into(target, source)
