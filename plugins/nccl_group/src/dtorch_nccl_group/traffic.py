"""When the communicators of one process are taken down, where ranks are threads of it, and who gets them before.

To take one down gives memory back, and CUDA waits for the kernels of a GPU, and of its peers, until it does that. Among
them may be a kernel of another communicator that waits for the very rank which closes its group: for ever. So as long
as ranks of this process have groups together, those that are closed are kept, and the last one takes all down. Until
then the next group over the same GPUs goes on with them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dtorch_core._goodbyes import say_elsewhere

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
    """The groups of thread ranks that are open, and the communicators of those that are closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        with self._lock:
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
        with self._lock:
            self._open[handle] = forgotten

    def left(self, handle: object, end: End | None = None, of: tuple[Communicator, int] | None = None) -> None:
        """A rank has left a group. The communicator goes now, if no such group is open here; else with the last one.

        Called in daemon threads alone, for which close() waits until its deadline: NCCL sets no bound to an end.

        :param end: None if it is down already.
        :param of: the communicator and the rank, if another group may go on with it.
        """
        with self._lock:
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
        threads = [threading.Thread(target=_quietly, args=(end,), name="ends NCCL", daemon=True) for end in ends]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join()


def _quietly(end: End) -> None:
    with suppress(RuntimeError):  # what fails here has failed already
        end()


HERE = Traffic()
"""Of this process."""
