"""When the communicators of one process are made, and when they are taken down, where ranks are threads of it.

To take one down gives memory back, and CUDA waits for the kernels of a GPU, and of its peers, until it does that. Among
them may be a kernel of another communicator that waits for the very rank which closes its group: for ever. So as long
as ranks of this process have groups together, those that are closed are kept, and the last one takes all down.

Nor are some made while others are taken down, although NCCL allows it: an end waits for kernels, and who makes one
waits for its peers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from dtorch_core import BackendContext
from dtorch_core._goodbyes import say_elsewhere

PATIENCE = 2.0
"""Seconds that an end waits for communicators that are being made: one whose ranks never all come is made for long."""

End = Callable[[], None]
"""Takes a communicator down."""


def is_shared(ctx: BackendContext) -> bool:
    """Other ranks of the group are threads of this process."""
    return len(ctx.topology.by_process()[ctx.topology[ctx.rank].process]) > 1


class Traffic:
    """Many may make communicators at once, or many take them down."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = {"making": 0, "ending": 0}
        self._open: dict[object, weakref.finalize[..., object]] = {}
        self._closed: list[End] = []

    def opened(self, handle: object, group: object) -> None:
        """A rank has a group with another rank of this process, until it has left it or forgotten ``group``.

        :param handle: stands for it; may be kept by what still listens to the other ranks.
        """
        forgotten = weakref.finalize(group, say_elsewhere, partial(self.left, handle), "ends NCCL")
        forgotten.atexit = False
        with self._condition:
            self._open[handle] = forgotten

    def left(self, handle: object, end: End | None = None) -> None:
        """A rank has left a group. The communicator goes now, if no such group is open here; else with the last one.

        Called in daemon threads alone, for which close() waits until its deadline: NCCL sets no bound to an end.

        :param end: None if it is down already.
        """
        with self._condition:
            forgotten = self._open.pop(handle, None)
            if forgotten is not None:
                forgotten.detach()

            if end is not None:
                self._closed.append(end)

            if self._open:
                return

            ends, self._closed = self._closed, []

        # All at once: NCCL's orderly end waits for all ranks of a process.
        threads = [threading.Thread(target=self._end, args=(end,), name="ends NCCL", daemon=True) for end in ends]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join()

    def _end(self, end: End) -> None:
        with suppress(RuntimeError), self.ending():  # what fails here has failed already
            end()

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

        try:
            yield
        finally:
            with self._condition:
                self._inside[kind] -= 1
                self._condition.notify_all()


HERE = Traffic()
"""Of this process."""
