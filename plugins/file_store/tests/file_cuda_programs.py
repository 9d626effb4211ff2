"""What the programs of ranks on one GPU have in common, and the list of them."""

from __future__ import annotations

import contextlib

import torch

from dtorch_core.testing._store_base import coded

GPU = "cuda:0"
LIMIT = 10.0
LONG = 400_000_000
"""Clock cycles: about 200 ms."""
SIZE = (1 << 20,)

PROGRAMS = {}
"""By name: the kind of handle, and the function."""


def program(kind):
    """A function to be called with a handle of this kind."""

    def add(body):
        PROGRAMS[body.__name__] = kind, body
        return body

    return add


@contextlib.contextmanager
def own_stream(handle, given="current stream"):
    """A stream of the rank's own as the current one, with memory in its pool; and the argument that names it."""
    stream = torch.cuda.default_stream() if given == "default stream" else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warm = [coded(0, SIZE, GPU) for _ in range(4)]
        warm[0].clone().fill_(1).copy_(warm[1])
        del warm
        stream.synchronize()
        handle.barrier()
        yield stream, stream if given == "stream=" else None


def is_busy(stream):
    event = torch.cuda.Event()
    event.record(stream)
    return not event.query()
