"""Communicators of one process are not made while others of it are taken down.

NCCL says that both may go on at once. Where ranks are threads, each closing one group while it opens the next, the
process has crashed inside NCCL all the same (torch 2.11, NCCL 2.28).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0
"""Seconds that one kind waits for the other: a communicator whose ranks never all come is being made for long."""


class Traffic:
    """Many may make communicators at once, or many take them down."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = {"making": 0, "ending": 0}

    @contextmanager
    def making(self) -> Iterator[None]:
        """A communicator is made meanwhile."""
        with self._alone("making", "ending"):
            yield

    @contextmanager
    def ending(self) -> Iterator[None]:
        """One is taken down meanwhile."""
        with self._alone("ending", "making"):
            yield

    @contextmanager
    def _alone(self, kind: str, other: str) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._inside[other], PATIENCE)
            self._inside[kind] += 1

        try:
            yield
        finally:
            with self._condition:
                self._inside[kind] -= 1
                self._condition.notify_all()


HERE = Traffic()
"""Of this process."""
