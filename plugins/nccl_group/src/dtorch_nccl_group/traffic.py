"""When the communicators of one process are taken down, where ranks are threads of it.

To take one down gives memory back, and CUDA waits for the kernels of a GPU, and of its peers, until it does that. Among
them may be a kernel of another communicator that waits for the very rank which closes its group: for ever. So as long
as ranks of this process have groups together, those that are closed are kept, and the last one takes all down.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dtorch_core._goodbyes import say_elsewhere

End = Callable[[], None]
"""Takes a communicator down."""


class Traffic:
    """The groups of thread ranks that are open, and the ends of those that are closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[object, weakref.finalize[..., object]] = {}
        self._closed: list[End] = []

    def opened(self, handle: object, group: object) -> None:
        """A rank has a group with another rank of this process, until it has left it or forgotten ``group``.

        :param handle: stands for it; may be kept by what still listens to the other ranks.
        """
        forgotten = weakref.finalize(group, say_elsewhere, partial(self.left, handle), "ends NCCL")
        forgotten.atexit = False
        with self._lock:
            self._open[handle] = forgotten

    def left(self, handle: object, end: End | None = None) -> None:
        """A rank has left a group. The communicator goes now, if no such group is open here; else with the last one.

        Called in daemon threads alone, for which close() waits until its deadline: NCCL sets no bound to an end.

        :param end: None if it is down already.
        """
        with self._lock:
            forgotten = self._open.pop(handle, None)
            if forgotten is not None:
                forgotten.detach()

            if end is not None:
                self._closed.append(end)

            if self._open:
                return

            ends, self._closed = self._closed, []

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
