"""A process that was forked from the ranks' has none of them but the one that forked, whose locks others may hold.

So no store goes on there: its session is replaced, and its goodbye is not said.
"""

from __future__ import annotations

import os
import weakref
from typing import NoReturn, Protocol

from dtorch_core import ProtocolError


class Handle(Protocol):
    """A rank's store."""

    def lose(self, instead: Forked) -> None:
        """Its session is the parent's."""


class Forked:
    """Stands for a session. What it is asked for raises, but for its end."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __getattr__(self, name: str) -> NoReturn:
        raise ProtocolError(
            f"the memory store was opened in pid {self._pid}, and this is pid {os.getpid()}, forked from it, without "
            f"its other ranks; start processes by spawn, and open it there"
        )

    def close(self, rank: int) -> None:
        """The parent's rank says its goodbye itself."""

    def abort(self, reason: str) -> None:
        """Nobody is here to be told."""

    def die(self, rank: int, reason: str) -> None:
        """Nor of this."""


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
_pid = os.getpid()


def remember(handle: Handle) -> None:
    """It is to be lost in a forked child."""
    _handles.add(handle)


def _forked() -> None:
    global _pid
    parent, _pid = _pid, os.getpid()
    instead = Forked(parent)
    for handle in list(_handles):
        handle.lose(instead)

    _handles.clear()  # a child of this process is told of those that are opened here


os.register_at_fork(after_in_child=_forked)
