"""One call of a placement function on one rank: its number, its keys, and what it still owes the others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from dtorch_core._text import rank_list
from dtorch_core.errors import DtorchError, StoreTimeoutError
from dtorch_core.placement._shards import Box
from dtorch_core.store import TensorStore

_lock = threading.Lock()
_counts: weakref.WeakKeyDictionary[TensorStore, int] = weakref.WeakKeyDictionary()


class Key(NamedTuple):
    """What one rank publishes in one call."""

    sender: int
    part: str


def hello_key(sender: int) -> Key:
    """What ``sender`` says of its part of the tensor."""
    return Key(sender, "hello")


def data_key(sender: int, region: Box, moved_to: str) -> Key:
    """One region of what ``sender`` holds, counted from the corner of its piece.

    :param moved_to: the device that the sender moves it to, or an empty string.
    """
    return Key(sender, f"{'x'.join(f'{start}-{stop}' for start, stop in region)} {moved_to}")


class Call:
    """Every rank counts its calls on a store, so that calls with one number meet under the same keys.

    Make it before anything can raise: a wrong call counts too.
    """

    def __init__(self, store: TensorStore, function: str) -> None:
        with _lock:
            self._number = _counts[store] = _counts.get(store, 0) + 1

        self.store = store
        self.rank = store.rank
        self.function = function
        self.what = f"{function} on store {store.name!r}, rank {store.rank}"
        """Begins every message."""
        self._published: dict[Key, Sequence[int]] = {}
        self._expected: dict[Key, None] = {}

    def publish(self, key: Key, tensor: Tensor, readers: Sequence[int], device: str | None = None) -> None:
        """Set a key for these ranks, if there are any.

        :param device: where the readers want it, if it is to be moved on this side.
        """
        if readers:
            self.store.src_set(self._text(key), tensor, len(readers), dest_device=device)
            self._published[key] = readers

    def expect(self, key: Key) -> None:
        """Note that this rank has to read a key: its sender counts on it."""
        self._expected[key] = None

    @contextmanager
    def borrow(self, key: Key) -> Iterator[Tensor]:
        """Read a key, waiting for it.

        :raises StoreTimeoutError: if its sender is late.
        """
        self._expected.pop(key, None)
        try:
            tensor = self.store.dest_get(self._text(key))
        except StoreTimeoutError as late:
            raise StoreTimeoutError(f"{self.what}: rank {key.sender} has not sent its part: {late}") from None

        try:
            yield tensor
        finally:
            self.store.dest_finish_get(self._text(key))

    def finish(self) -> None:
        """Wait until all that this rank has published has been read.

        :raises StoreTimeoutError: if a reader is late.
        """
        for key, readers in self._published.items():
            try:
                self.store.src_wait_until_get_finished(self._text(key))
            except StoreTimeoutError as late:
                raise StoreTimeoutError(
                    f"{self.what}: not all of {rank_list(readers)} have read their part: {late}"
                ) from None

    def release(self) -> None:
        """This rank fails: let those go who have sent to it and wait until it has read."""
        for key in list(self._expected):
            try:
                with self.borrow(key):
                    pass
            except DtorchError:
                return  # its sender is late or gone; this rank has a better error to raise

    def _text(self, key: Key) -> str:
        return f"dtorch.placement/{self._number}/{key.sender}/{key.part}"
