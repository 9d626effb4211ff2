"""Work that nobody waits for: whatever thread comes by does it, outside all locks and one job after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial


class Again(partial[None]):
    """A job that may be begun twice: so it is kept where its first beginning was interrupted."""


def _nothing() -> None:
    """No job."""


class _Here(threading.local):
    """What this thread is at."""

    busy = False
    """A job."""


class Jobs(deque[Callable[[], None]]):
    """The jobs of one node. None waits for another rank."""

    def __init__(self) -> None:
        super().__init__()
        self._next_job = iter(self.popleft, None)
        self.here = _Here()

    @property
    def busy(self) -> bool:
        """This thread is at a job: what is to be done now is done after that."""
        return self.here.busy

    def do(self, job: Callable[[], None]) -> None:
        """Do a job now; if this thread is at one, after that. One inside the other would be as deep as there are calls,
        and could wait for what is under it.
        """
        if self.here.busy:
            self.append(job)
        else:
            self.work_off(job)

    def work_off(self, first: Callable[[], None] | None = None) -> None:
        """Do that, then what there is, also what comes meanwhile."""
        here = self.here
        here.busy = True
        try:
            if first is not None:
                first()

            while self:
                job = _nothing
                try:
                    for job in self._next_job:  # noqa: B007 - no call, after which an interrupt would lose it
                        break
                except IndexError:  # another thread took it
                    break

                try:
                    job()
                except BaseException:  # Ctrl-C: maybe before its first line
                    if isinstance(job, Again):
                        self.appendleft(job)

                    raise
        finally:
            here.busy = False
