"""When the communicators of one process are made, and when they are taken down, where ranks are threads of it.

To take one down gives memory back, and CUDA waits for the kernels of a GPU, and of its peers, until it does that. Among
them may be a kernel of another communicator that waits for the very rank which closes its group: for ever. So as long
as ranks of this process have groups together, those that are closed are kept, and the last one takes all down.

Nor are some made while others are taken down, although NCCL allows it: an end waits for kernels, and who makes one
waits for its peers.

The same holds for what is left of a group then. torch's ProcessGroupNCCL destroys CUDA events when it is collected, and
CUDA does that once no thread waits on that GPU for a copy to the host. The collector runs in whichever thread makes
objects: in a rank for which that copy waits, say, by way of a kernel. So it does not find what is kept here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from dtorch_core import BackendContext
from dtorch_core._goodbyes import say_elsewhere

PATIENCE = 2.0
"""Seconds that an end waits for communicators that are being made: one whose ranks never all come is made for long."""

End = Callable[[], None]
"""Takes a communicator down."""


def is_shared(ctx: BackendContext) -> bool:
    """Other ranks of the group are threads of this process."""
    return len(ctx.topology.by_process()[ctx.topology[ctx.rank].process]) > 1


def may_be_shared(ctx: BackendContext) -> bool:
    """This process has other ranks, as far as the group can know."""
    return ctx.world_size == 1 or is_shared(ctx)


class Traffic:
    """Many may make communicators at once, or many take them down."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = {"making": 0, "ending": 0}
        self._open: set[object] = set()
        self._closed: list[End] = []
        self._kept: list[tuple[weakref.ref[dist.ProcessGroup], object]] = []

    def opened(self, handle: object) -> None:
        """A rank is about to have a group with another rank of this process, until it has left it."""
        with self._condition:
            self._open.add(handle)

    def keep(self, group: dist.ProcessGroup, backend: object) -> None:
        """Keep the backend of a group until the group is gone, and no rank has another one."""
        gone = weakref.ref(group, lambda _: say_elsewhere(self._take_down, "ends NCCL"))
        with self._condition:
            self._kept.append((gone, backend))

    def left(self, handle: object, end: End | None = None) -> None:
        """A rank has left a group. The communicator goes now, if no such group is open here; else with the last one.

        Called in daemon threads alone, for which close() waits until its deadline: NCCL sets no bound to an end.

        :param end: None if it is down already.
        """
        with self._condition:
            self._open.discard(handle)
            if end is not None:
                self._closed.append(end)

        self._take_down()

    def _take_down(self) -> None:
        """What no open group keeps."""
        with self._condition:
            if self._open:
                return

            ends, self._closed = self._closed, []
            # From this moment on: a group that is opened before a thread runs would have kernels by then.
            self._inside["ending"] += 1

        with self._leaving("ending"):
            with self._condition:
                self._condition.wait_for(lambda: not self._inside["making"], PATIENCE)

            _all_at_once(ends)
            with self._condition:
                kept, self._kept = self._kept, []
                self._kept = [(group, backend) for group, backend in kept if group() is not None]

            kept.clear()  # collected here, outside the lock

    @contextmanager
    def making(self, patience: float) -> Iterator[None]:
        """A communicator is made meanwhile.

        :param patience: seconds that it waits for ends; NCCL sets no bound to one.
        """
        with self._alone("making", "ending", patience):
            yield

    @contextmanager
    def ending(self) -> Iterator[None]:
        """One is taken down meanwhile."""
        with self._alone("ending", "making", PATIENCE):
            yield

    @contextmanager
    def _alone(self, kind: str, other: str, patience: float) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._inside[other], patience)
            self._inside[kind] += 1

        with self._leaving(kind):
            yield

    @contextmanager
    def _leaving(self, kind: str) -> Iterator[None]:
        """Who is inside goes at the end."""
        try:
            yield
        finally:
            with self._condition:
                self._inside[kind] -= 1
                self._condition.notify_all()


def _all_at_once(ends: list[End]) -> None:
    """NCCL's orderly end waits for all ranks of a process."""
    threads = [threading.Thread(target=quietly, args=(end,), name="ends NCCL", daemon=True) for end in ends]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()


def quietly(call: Callable[[], None]) -> None:
    """Of an end: what fails here has failed already."""
    with suppress(RuntimeError):
        call()


HERE = Traffic()
"""Of this process."""
