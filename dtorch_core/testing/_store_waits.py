"""The waits of a store, for tests of how each of them ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtorch_core.store import TensorStore
from dtorch_core.testing._store_base import coded

Wait = Callable[..., object]
"""One of the four below: takes the store and ``timeout``."""


def get_wanted(store: TensorStore, timeout: float | None = None) -> object:
    return store.dest_get("wanted", timeout=timeout)


def wait_for_unread(store: TensorStore, timeout: float | None = None) -> object:
    """Its key is set before, by :func:`set_unread`."""
    return store.src_wait_until_get_finished("unread", timeout=timeout)


def meet(store: TensorStore, timeout: float | None = None) -> object:
    return store.barrier(timeout=timeout)


def reset(store: TensorStore, timeout: float | None = None) -> object:
    return store.reset(timeout=timeout)


WAITS = pytest.mark.parametrize("wait", [get_wanted, wait_for_unread, meet], ids=["get", "wait", "barrier"])
WAITS_AND_RESET = pytest.mark.parametrize(
    "wait", [get_wanted, wait_for_unread, meet, reset], ids=["get", "wait", "barrier", "reset"]
)
MEETINGS = pytest.mark.parametrize("wait", [meet, reset], ids=["barrier", "reset"])


def set_unread(store: TensorStore, rank: int) -> None:
    """Where the store is this rank's: set a key for one consumer, which never comes."""
    if store.rank == rank:
        store.src_set("unread", coded(0, device=store.device), 1)
