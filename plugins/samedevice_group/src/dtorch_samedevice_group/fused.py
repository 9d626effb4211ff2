"""Does collectives on CUDA with one fused kernel each, where it can.

Torch's kernels, of which each works on a pair of tensors, read and write some of them several times; a fused one reads
each input once, and writes each output once. What can't be fused is left to torch, with the same results: strided
tensors and conjugates, more than 16 ranks, tensors that overlap, and reductions that have no recipe.

Each function returns what is left to do, or whether all is done. What it has done is queued on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from dtorch_samedevice_group.blocks import Job
from dtorch_samedevice_group.fused_launch import BLOCK_BYTES, MOST, launcher
from dtorch_samedevice_group.places import alignment, apart, step_of, word
from dtorch_samedevice_group.recipes import Recipe


def takes(tensor: Tensor) -> bool:
    """Fused kernels may be used for it and its like."""
    return tensor.is_cuda and launcher.usable


def reduce(how: Recipe, inputs: Job, outputs: Job) -> bool:
    """Every output becomes the reduction of the inputs, which may be outputs."""
    nbytes, device = inputs[0].nbytes, inputs[0].get_device()
    ins = _places(inputs, nbytes)
    outs = ins if outputs is inputs else _places(outputs, nbytes)
    if ins is None or outs is None or not 2 <= len(ins) <= MOST:
        return False

    # Where an input is an output too, the same thread reads it before it writes there.
    written = set(outs)
    if not apart(written, nbytes, set(ins) - written, nbytes):
        return False

    if not _launch_reduce(how, device, nbytes, ins, outs, 0):
        return False

    increment_version(outputs)
    return True


def reduce_in_place(how: Recipe, jobs: Sequence[Job]) -> Sequence[Job]:
    """Each job's tensors become their reduction. Returns the jobs that are left."""
    return [job for job in jobs if not reduce(how, job, job)]


def reduce_each(how: Recipe, jobs: Sequence[Job]) -> Sequence[Job]:
    """Of each job, the first tensor becomes the reduction of the others. Returns the jobs that are left."""
    if _reduce_spaced(how, jobs):
        return ()

    for number, (out, *inputs) in enumerate(jobs):
        if not reduce(how, inputs, [out]):
            return jobs[number:]  # the later ones too: their order stays

    return ()


def spread(jobs: Sequence[Job]) -> Sequence[Job]:
    """Of each job, the first tensor is copied to the others. Returns the jobs that are left."""
    if len(jobs) > 1 and _spread_spaced(jobs):
        return ()

    for number, job in enumerate(jobs):
        if job[0].nbytes and not _spread_spaced([job]):
            return jobs[number:]

    return ()


def exchange(sources: Sequence[Job], targets: Sequence[Job]) -> bool:
    """``sources[s][r]`` is copied to ``targets[r][s]``."""
    nbytes, device = sources[0][0].nbytes, sources[0][0].get_device()
    given = [_row(tensors, nbytes) for tensors in sources]
    taken = [_row(tensors, nbytes) for tensors in targets]
    in_step, out_step = step_of(given, nbytes), step_of(taken, nbytes)
    if in_step is None or out_step is None or max(len(given), len(taken)) > MOST:
        return False

    read, written = ins, outs = _firsts(given), _firsts(taken)
    if len(ins) == 1:  # a target in its source's place is not written
        written = [place for number, place in enumerate(outs) if place != ins[0] + number * in_step]
    elif len(outs) == 1:  # a source in its target's place is not read
        read = [place for number, place in enumerate(ins) if place != outs[0] + number * out_step]

    in_bytes, out_bytes = (len(outs) - 1) * in_step + nbytes, (len(ins) - 1) * out_step + nbytes
    if not apart(written, out_bytes, read, in_bytes):
        return False

    if not _launch_copy(device, nbytes, ins, outs, False, in_step, out_step):
        return False

    increment_version([tensor for tensors in targets for tensor in tensors])
    return True


def _reduce_spaced(how: Recipe, jobs: Sequence[Job]) -> bool:
    """All jobs in one launch, where each rank's inputs lie at one distance from each other."""
    nbytes, device = jobs[0][0].nbytes, jobs[0][0].get_device()
    first, *others = zip(*jobs, strict=True)
    outs, rows = _places(first, nbytes), [_row(tensors, nbytes) for tensors in others]
    step = step_of(rows, nbytes)
    if outs is None or step is None or not 2 <= len(rows) <= MOST or len(jobs) > MOST:
        return False

    ins = _firsts(rows)
    places, length = set(ins), (len(jobs) - 1) * step + nbytes
    # An output in the place of an input of its own job is read and written by the same thread: other outputs may lie
    # nowhere near, and then no rank's inputs may lie across another one's.
    elsewhere = [place for number, place in enumerate(outs) if place - number * step not in places]
    if not apart(elsewhere, nbytes, places, length):
        return False

    if len(elsewhere) < len(outs) and not apart(places, length, (), 0):
        return False

    if not _launch_reduce(how, device, nbytes, ins, outs, step):
        return False

    increment_version([job[0] for job in jobs])
    return True


def _spread_spaced(jobs: Sequence[Job]) -> bool:
    """All jobs in one launch, where each rank's targets lie at one distance from each other."""
    nbytes, device = jobs[0][0].nbytes, jobs[0][0].get_device()
    first, *others = zip(*jobs, strict=True)
    sources, rows = _places(first, nbytes), [_row(tensors, nbytes) for tensors in others]
    step = step_of(rows, nbytes)
    if sources is None or step is None or max(len(sources), len(rows)) > MOST:
        return False

    if len(sources) == len(rows) == 1:
        return False  # torch copies one tensor to another one as fast

    # A source in the place of one of its targets, which is not written, may lie among the targets.
    outs = _firsts(rows)
    read = [place for number, place in enumerate(sources) if place - number * step not in outs]
    if not apart(outs, (len(sources) - 1) * step + nbytes, read, nbytes):
        return False

    if not _launch_copy(device, nbytes, sources, outs, True, 0, step):
        return False

    increment_version([tensor for job in jobs for tensor in job[1:]])
    return True


def _places(tensors: Job, nbytes: int) -> list[int] | None:
    """Their addresses; None if there is nothing to move, or one is strided, or has another size.

    They are on one device: the ranks' fingerprints say which. This is most of what a small collective costs here.
    """
    if not nbytes:
        return None

    complex_too = tensors[0].is_complex()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.nbytes != nbytes or tensor.is_neg() or complex_too and tensor.is_conj():
            return None

    return [tensor.data_ptr() for tensor in tensors]


def _row(tensors: Job, nbytes: int) -> list[int] | None:
    """As :func:`_places`, of parts of one tensor. Others may lie as evenly, by chance: another kernel is not compiled
    for that."""
    places = _places(tensors, nbytes)
    if places is not None and len(places) > 1:
        width = tensors[0].element_size()
        starts = {place - width * tensor.storage_offset() for place, tensor in zip(places, tensors, strict=True)}
        # Of another process's tensor each part is a storage, of memory that torch did not allocate.
        if len(starts) > 1 and any([tensor.untyped_storage().resizable() for tensor in tensors]):
            return None

    return places


def _firsts(rows: Sequence[list[int] | None]) -> list[int]:
    return [row[0] for row in rows if row]


def _launch_reduce(how: Recipe, device: int, nbytes: int, ins: list[int], outs: list[int], step: int) -> bool:
    """With a step, output k from all inputs + k * step; else all outputs from the inputs."""
    width = how.dtype.itemsize
    align = alignment(width, step, *ins, *outs)
    variant = ("reduce", len(ins), len(outs), not step, *how, align, BLOCK_BYTES // width)
    grid = (-(-nbytes // BLOCK_BYTES), len(outs) if step else 1, 1)
    return bool(align) and launcher.launch(variant, device, grid, ins, outs, nbytes // width, step)


def _launch_copy(
    device: int, nbytes: int, ins: list[int], outs: list[int], spread: bool, in_step: int, out_step: int
) -> bool:
    width, align = word(nbytes, in_step, out_step, *ins, *outs)
    variant = ("copy", len(ins), len(outs), spread, width, align, BLOCK_BYTES // width)
    grid = (-(-nbytes // BLOCK_BYTES), len(ins) if spread else len(ins) * len(outs), 1)
    return launcher.launch(variant, device, grid, ins, outs, nbytes // width, in_step, out_step)
