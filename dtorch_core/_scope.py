"""Everything that one rank of a :func:`spawn` has open, so that a failing rank can wake the others from every wait."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store

    from dtorch_core._meeting.board import Board


log = logging.getLogger("dtorch")


class Abortable(Protocol):
    """What can wake its waits: stores, groups, meetings."""

    def abort(self, reason: str, *, died: bool = False) -> None: ...


class Scope:
    """One rank's open handles, the rendezvous its names meet at by default, and what it has instead of the process."""

    def __init__(self, rank: int, board: Board, device: str = "cpu") -> None:
        outer = current()
        self.rank = rank
        self.board = board
        self.device = device
        self.own: dict[str, Any] = {} if outer is None else dict(outer.own)
        """What other ranks of this process have of their own as well, by whoever looks it up. A rank that spawns ranks
        is to them what the process is to it."""
        self._lock = threading.Lock()
        self._open: weakref.WeakKeyDictionary[Abortable, None] = weakref.WeakKeyDictionary()
        """In the order in which they were opened."""
        self._ended: tuple[str, bool] | None = None

    @property
    def rendezvous(self) -> Store:
        """The place where names meet, with a connection of this rank's own."""
        return self.board.store()

    def add(self, handle: Abortable) -> None:
        """Remember a handle; abort it at once if the scope has been aborted."""
        with self._lock:
            self._open[handle] = None
            ended = self._ended

        if ended is not None:
            handle.abort(ended[0], died=ended[1])

    def abort(self, reason: str, *, died: bool = False) -> None:
        """Wake every wait of this rank, and of its peers on what it has open. ``died``: this rank is the cause."""
        with self._lock:
            self._ended = self._ended or (reason, died)
            handles = list(self._open)

        for handle in handles:
            try:
                handle.abort(reason, died=died)
            except Exception:  # a backend's: the other handles have to be woken all the same
                log.exception("rank %s: ending %r failed", self.rank, handle)

    def close(self) -> None:
        """Close what the rank left open, the last one first: an orderly return says goodbye.

        What a handle has opened for itself, before it was there, is closed after it: it may have last words to say.
        """
        self._closing().close()

    def left_open(self) -> ExitStack:
        """What :meth:`close` does to what is open now, for later: it is no longer the scope's."""
        closing = self._closing()
        with self._lock:
            self._open.clear()

        return closing

    def _closing(self) -> ExitStack:
        with self._lock:
            handles = list(self._open)

        closing = ExitStack()  # closes all of them, also if one raises
        for handle in handles:
            closing.callback(getattr(handle, "close", lambda: None))

        return closing


_local = threading.local()


def current() -> Scope | None:
    """The scope of the rank that runs in this thread, or None outside :func:`spawn`."""
    return getattr(_local, "scope", None)


def enter(scope: Scope | None) -> None:
    """Make this thread a rank's own, or nobody's."""
    _local.scope = scope


@contextmanager
def within(scope: Scope | None) -> Iterator[None]:
    """What is opened in here, in whatever thread of the rank, is the scope's."""
    before = current()
    enter(scope)
    try:
        yield
    finally:
        enter(before)
