"""Kernels that do a whole collective in one launch: each input is read once, each output is written once.

Addresses come as numbers: a launch then needs no tensors, and one compiled kernel serves all addresses of one
alignment. Most blocks are full and are moved without a mask, in words of 16 bytes where the addresses allow it; a mask
would let the compiler use single elements only. This is the one file that imports triton.
"""

# Triton compiles these functions from their source: what it needs of annotations is its own.
# ruff: noqa: ANN001, ANN201, ANN202, ANN401
# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
}
PIECES = tl.constexpr(8)
"""In which the last block is moved: all of it at once, with a mask, would take three times the registers, of all."""

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _chosen(addresses, number, COUNT: tl.constexpr):
    """``addresses[number]``: they are in registers, which have no numbers."""
    address = addresses[0]
    for other in tl.static_range(1, COUNT):
        address = tl.where(number == other, addresses[other], address)

    return address


@triton.jit
def _elements(address, first, DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Where a block's elements are."""
    start = tl.multiple_of(tl.cast(address, tl.pointer_type(DTYPE)), ALIGN)
    return start + first + tl.arange(0, BLOCK)


@triton.jit
def _load(
    address, first, length, DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr
):
    elements = _elements(address, first, DTYPE, ALIGN, BLOCK)
    if FULL:
        values = tl.load(elements)
    else:
        values = tl.load(elements, mask=tl.arange(0, BLOCK) < length - first, other=0)

    return values


@triton.jit
def _store(
    values, address, first, length, DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr
):
    elements = _elements(address, first, DTYPE, ALIGN, BLOCK)
    if FULL:
        tl.store(elements, values)
    else:
        tl.store(elements, values, mask=tl.arange(0, BLOCK) < length - first)


@triton.jit
def _combine(a, b, OP: tl.constexpr):
    """As :class:`dtorch_core.reduction.Rule` does on CUDA: of two NaNs the first one wins, with its payload."""
    if OP == "add":
        result = a + b
    elif OP == "mul":
        result = a * b
    else:
        x, y = a, b
        if a.dtype == tl.bfloat16:  # as triton did by itself up to 3.8: its interpreter compares them as integers
            x, y = a.to(tl.float32), b.to(tl.float32)

        result = (tl.minimum(x, y) if OP == "min" else tl.maximum(x, y)).to(a.dtype)
        if a.dtype.is_floating():
            result = tl.where(a != a, a, tl.where(b != b, b, result))

    return result


@triton.jit
def _reduce_block(
    ins,
    outs,
    first,
    length,
    job,
    in_step,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SPREAD: tl.constexpr,
    OP: tl.constexpr,
    DIVIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    total = _load(ins[0] + job * in_step, first, length, DTYPE, ALIGN, BLOCK, FULL).to(COMPUTE)
    for number in tl.static_range(1, IN):
        term = _load(ins[number] + job * in_step, first, length, DTYPE, ALIGN, BLOCK, FULL).to(COMPUTE)
        total = _combine(total, term, OP)

    if DIVIDE:
        count = tl.full([BLOCK], IN, COMPUTE)
        if COMPUTE == tl.float32:
            total = tl.div_rn(total, count)  # `/` rounds float32 wrongly now and then
        else:
            total = total / count

    result = total.to(DTYPE)
    if SPREAD:
        for number in tl.static_range(OUT):
            _store(result, outs[number], first, length, DTYPE, ALIGN, BLOCK, FULL)
    else:
        _store(result, _chosen(outs, job, OUT), first, length, DTYPE, ALIGN, BLOCK, FULL)


NUMBERS = [*[f"i{number}" for number in range(16)], *[f"o{number}" for number in range(16)]]
NUMBERS += ["length", "in_step", "out_step"]
"""Parameters that are no constants. Triton would compile a kernel for 1 and one for multiples of 16, and the first one
that was compiled would be launched with all others too."""


# fmt: off
@triton.jit(do_not_specialize=NUMBERS)
def reduce(
    i0: tl.int64, i1: tl.int64, i2: tl.int64, i3: tl.int64, i4: tl.int64, i5: tl.int64, i6: tl.int64, i7: tl.int64,
    i8: tl.int64, i9: tl.int64, i10: tl.int64, i11: tl.int64, i12: tl.int64, i13: tl.int64, i14: tl.int64,
    i15: tl.int64,
    o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64, o4: tl.int64, o5: tl.int64, o6: tl.int64, o7: tl.int64,
    o8: tl.int64, o9: tl.int64, o10: tl.int64, o11: tl.int64, o12: tl.int64, o13: tl.int64, o14: tl.int64,
    o15: tl.int64,
    length: tl.int64, in_step: tl.int64, out_step: tl.int64,
    IN: tl.constexpr, OUT: tl.constexpr, SPREAD: tl.constexpr,
    OP: tl.constexpr, DIVIDE: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):
    """Output k becomes the reduction of what lies at every input + k * in_step; with SPREAD, every output of job 0."""
    ins = (i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15)
    outs = (o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10, o11, o12, o13, o14, o15)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    job = tl.program_id(1)
    if first + BLOCK <= length:
        _reduce_block(ins, outs, first, length, job, in_step,
                      IN, OUT, SPREAD, OP, DIVIDE, DTYPE, COMPUTE, ALIGN, BLOCK, True)
    else:
        while first < length:
            _reduce_block(ins, outs, first, length, job, in_step,
                          IN, OUT, SPREAD, OP, DIVIDE, DTYPE, COMPUTE, ALIGN, BLOCK // PIECES, False)
            first += BLOCK // PIECES


@triton.jit(do_not_specialize=NUMBERS)
def copy(
    i0: tl.int64, i1: tl.int64, i2: tl.int64, i3: tl.int64, i4: tl.int64, i5: tl.int64, i6: tl.int64, i7: tl.int64,
    i8: tl.int64, i9: tl.int64, i10: tl.int64, i11: tl.int64, i12: tl.int64, i13: tl.int64, i14: tl.int64,
    i15: tl.int64,
    o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64, o4: tl.int64, o5: tl.int64, o6: tl.int64, o7: tl.int64,
    o8: tl.int64, o9: tl.int64, o10: tl.int64, o11: tl.int64, o12: tl.int64, o13: tl.int64, o14: tl.int64,
    o15: tl.int64,
    length: tl.int64, in_step: tl.int64, out_step: tl.int64,
    IN: tl.constexpr, OUT: tl.constexpr, SPREAD: tl.constexpr, DTYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):
    """With SPREAD, input s goes to every output + s * out_step. Without, input s + r * in_step goes to
    output r + s * out_step, and job number r * IN + s does that."""
    ins = (i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15)
    outs = (o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10, o11, o12, o13, o14, o15)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    job = tl.program_id(1)
    if first + BLOCK <= length:
        _copy_block(ins, outs, first, length, job, in_step, out_step, IN, OUT, SPREAD, DTYPE, ALIGN, BLOCK, True)
    else:
        while first < length:
            _copy_block(ins, outs, first, length, job, in_step, out_step,
                        IN, OUT, SPREAD, DTYPE, ALIGN, BLOCK // PIECES, False)
            first += BLOCK // PIECES
# fmt: on


@triton.jit
def _copy_block(
    ins,
    outs,
    first,
    length,
    job,
    in_step,
    out_step,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SPREAD: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    if SPREAD:
        source = _chosen(ins, job, IN)
        values = _load(source, first, length, DTYPE, ALIGN, BLOCK, FULL)
        for number in tl.static_range(OUT):
            target = outs[number] + job * out_step
            if target != source:  # what is in place already
                _store(values, target, first, length, DTYPE, ALIGN, BLOCK, FULL)
    else:
        sender, receiver = job % IN, job // IN
        source = _chosen(ins, sender, IN) + receiver * in_step
        target = _chosen(outs, receiver, OUT) + sender * out_step
        if target != source:
            values = _load(source, first, length, DTYPE, ALIGN, BLOCK, FULL)
            _store(values, target, first, length, DTYPE, ALIGN, BLOCK, FULL)


def variant(name: Any, inputs: int, outputs: int, spread: bool, *others: Any) -> tuple[Any, tuple[object, ...]]:
    """A kernel, and its constants, after which it is compiled.

    :param others: of "reduce" the recipe's fields, of "copy" the bytes of a word; then the alignment of all addresses
        and the elements of a block.
    """
    if name == "copy":
        width, align, block = others
        return copy, (inputs, outputs, spread, _WORDS[width], align, block)

    op, divide, dtype, compute, align, block = others
    return reduce, (inputs, outputs, spread, op, divide, _DTYPES[dtype], _DTYPES[compute], align, block)
