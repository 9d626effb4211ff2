"""One call of a placement function on one rank: its number, its keys, and what it still owes the others."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager

from torch import Tensor

from dtorch_core.errors import DtorchError
from dtorch_core.placement._shards import Box
from dtorch_core.store import TensorStore

_lock = threading.Lock()
_counts: weakref.WeakKeyDictionary[TensorStore, int] = weakref.WeakKeyDictionary()


class Call:
    """Every rank counts its calls on a store, so that calls with one number meet under the same keys.

    Make it before anything can raise: a wrong call counts too.
    """

    def __init__(self, store: TensorStore, function: str) -> None:
        with _lock:
            number = _counts[store] = _counts.get(store, 0) + 1

        self.store = store
        self.rank = store.rank
        self.function = function
        self.what = f"{function} on store {store.name!r}, rank {store.rank}"
        """Begins every message."""
        self._prefix = f"dtorch.placement/{number}"
        self._published: list[str] = []
        self._expected: dict[str, None] = {}

    def publish(self, key: str, tensor: Tensor, readers: int, device: str | None = None) -> None:
        """Set a key of this call for ``readers`` ranks, if there are any.

        :param device: where the readers want it, if it is to be moved on this side.
        """
        if readers:
            self.store.src_set(f"{self._prefix}/{key}", tensor, readers, dest_device=device)
            self._published.append(key)

    def expect(self, key: str) -> None:
        """Note that this rank has to read a key: somebody counts on it."""
        self._expected[key] = None

    def borrow(self, key: str) -> AbstractContextManager[Tensor]:
        """Read a key of this call, waiting for it."""
        self._expected.pop(key, None)
        return self.store.borrow(f"{self._prefix}/{key}")

    def finish(self) -> None:
        """Wait until all that this rank has published has been read."""
        for key in self._published:
            self.store.src_wait_until_get_finished(f"{self._prefix}/{key}")

    def release(self) -> None:
        """This rank fails: let those go who have sent to it and wait until it has read."""
        for key in list(self._expected):
            try:
                with self.borrow(key):
                    pass
            except DtorchError:
                # The sender is gone or late; this rank has a better error to raise.
                return


def data_key(sender: int, region: Box, moved_to: str) -> str:
    """The key of one region of what ``sender`` holds, counted from the corner of its piece.

    :param moved_to: the device that the sender moves it to, or an empty string.
    """
    return f"{sender}/{'x'.join(f'{start}-{stop}' for start, stop in region)}/{moved_to}"
