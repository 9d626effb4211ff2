"""When the communicators of one process are taken down, where ranks are threads of it, and who gets them before.

To take one down gives memory back, and CUDA waits for the kernels of a GPU, and of its peers, until it does that. Among
them may be a kernel of another communicator that waits for the very rank which closes its group: for ever. So as long
as ranks of this process have groups together, those that are closed are kept, and the last one takes all down. Until
then the next group over the same GPUs goes on with them.

Nor are some made while others are taken down. NCCL says that both may go on at once; sums came out wrong on two H200
all the same, and ranks waited for each other (torch 2.11, NCCL 2.28).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dtorch_core._goodbyes import say_elsewhere

PATIENCE = 2.0
"""Seconds that an end waits for communicators that are being made: one whose ranks never all come is made for long."""

End = Callable[[], None]
"""Takes a rank's part of a communicator down."""


@dataclass(eq=False)
class Communicator:
    """What connects some ranks of this process."""

    devices: tuple[str, ...]
    """By rank."""
    backends: dict[int, Any] = field(default_factory=dict)
    """torch's, by rank, once made."""


class Traffic:
    """The groups of thread ranks that are open, and the communicators of those that are closed.

    Many may make communicators at once, or many take them down.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = {"making": 0, "ending": 0}
        self._open: dict[object, weakref.finalize[..., object]] = {}
        self._closed: dict[Communicator | object, dict[int, End]] = {}
        self._taken: dict[str, tuple[Communicator, set[int]]] = {}
        """By opening, until all its ranks have come: what they get, and who has it."""

    def take(self, devices: tuple[str, ...], opening: str, rank: int) -> Communicator:
        """The communicator of a group that is being opened, the same for all its ranks.

        :param devices: of the group's ranks, all of which are threads of this process.
        :param opening: names it; no other one has that name.
        :returns: one whose last group every rank has closed and that has all it needs, or a new one.
        """
        with self._condition:
            if opening not in self._taken:
                self._taken[opening] = self._kept(devices) or Communicator(devices), set()

            communicator, ranks = self._taken[opening]
            ranks.add(rank)
            if len(ranks) == len(devices):
                del self._taken[opening]

        return communicator

    def _kept(self, devices: tuple[str, ...]) -> Communicator | None:
        for kept, ends in self._closed.items():
            if isinstance(kept, Communicator) and kept.devices == devices and len(ends) == len(devices):
                del self._closed[kept]
                return kept

        return None

    def opened(self, handle: object, group: object) -> None:
        """A rank has a group with another rank of this process, until it has left it or forgotten ``group``.

        :param handle: stands for it; may be kept by what still listens to the other ranks.
        """
        forgotten = weakref.finalize(group, say_elsewhere, partial(self.left, handle), "ends NCCL")
        forgotten.atexit = False
        with self._condition:
            self._open[handle] = forgotten

    def left(self, handle: object, end: End | None = None, of: tuple[Communicator, int] | None = None) -> None:
        """A rank has left a group. The communicator goes now, if no such group is open here; else with the last one.

        Called in daemon threads alone, for which close() waits until its deadline: NCCL sets no bound to an end.

        :param end: None if it is down already.
        :param of: the communicator and the rank, if another group may go on with it.
        """
        with self._condition:
            forgotten = self._open.pop(handle, None)
            if forgotten is not None:
                forgotten.detach()

            if end is not None:
                communicator, rank = of or (handle, 0)
                self._closed.setdefault(communicator, {})[rank] = end

            if self._open:
                return

            ends = [end for kept in self._closed.values() for end in kept.values()]
            self._closed.clear()

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
