"""What ranks on one GPU do to show that processes exchange CUDA tensors. Imported by the ranks' processes.

Each program has an opening of its own, so that one that fails leaves the next ones alone.
"""

from __future__ import annotations

import time
import traceback

import file_cuda_group_programs  # noqa: F401
import file_cuda_store_programs  # noqa: F401
import torch
from file_cuda_programs import GPU, LIMIT, PROGRAMS


def names(kind):
    return [name for name, (found, _) in PROGRAMS.items() if found == kind]


def play(ctx, chosen):
    """What became of each program on this rank: None, or the traceback."""
    torch.cuda.set_device(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        _warm()

    said = {}
    for name in chosen:
        kind, body = PROGRAMS[name]
        begun = time.monotonic()
        try:
            with _opened(ctx, kind, name) as handle:
                body(handle)
        except BaseException:
            said[name] = f"rank {ctx.rank}, after {time.monotonic() - begun:.1f} s\n{traceback.format_exc()}"
        else:
            said[name] = None

    return said


def _opened(ctx, kind, name):
    if kind != "group":
        return ctx.open_store(name, backend="file", timeout=LIMIT)

    return ctx.open_group(name, backend="samedevice", timeout=LIMIT)


def _warm():
    """Load the kernels, which would wait for the device."""
    for dtype in (torch.float32, torch.int64):
        x = torch.arange(64, device=GPU, dtype=dtype)
        x.clone().fill_(-1).add_(x).copy_(x)
        torch.zeros(64, device=GPU, dtype=dtype)
        torch.cat([x, x])
        x.add_(1000 * x)
        x[::2].clone()
        x.reshape(8, 8).t().clone()
        torch.equal(x, x)

    torch.cuda._sleep(1)
    torch.cuda.synchronize()
