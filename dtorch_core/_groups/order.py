"""Calls begin in the order in which they were made, also those that wait for their ranks' sizes first.

Kernels that wait for each other have to be queued in one order on every rank. A call whose sizes are still under way
would be overtaken by the next one; so that one waits for its turn.

To begin a call may take until every rank begins it: NCCL connects ranks when they first need it. So the thread that
brings the sizes, which may be any rank's, begins nothing. The thread that waits for the call does, else one of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from dtorch_core._futures import settle_after
from dtorch_core._text import seconds
from dtorch_core.errors import StoreTimeoutError
from dtorch_core.extras import Place, texts_of
from dtorch_core.joint import Ticket


class LaunchOrder:
    """The turns of one device, or of one group. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: deque[Turn] = deque()
        self._beginning = False

    @property
    def holds_back(self) -> bool:
        """A call has to begin before the next one can."""
        return bool(self._turns)

    def turn(self, call: str, ticket: Ticket | None) -> Turn | None:
        """A place in the order; None if there is nothing to wait for."""
        if ticket is None and not self._turns:
            return None

        with self._lock:
            turn = Turn(self, call, ticket, self._lock)
            self._turns.append(turn)

        return turn

    def advance(self) -> None:
        """Begin every call whose turn it is. One thread at a time does."""
        while True:
            with self._lock:
                if self._beginning or not self._turns or not self._turns[0].ready:
                    return

                self._beginning = True
                turn = self._turns[0]

            try:
                turn.begin()
            finally:
                with self._lock:
                    self._turns.popleft()
                    self._beginning = False

                turn.over.set()


class Turn:
    """One call's place. A Work takes it for the notes that it waits for."""

    place: Place = nullcontext()

    def __init__(self, order: LaunchOrder, call: str, ticket: Ticket | None, lock: threading.Lock) -> None:
        self._order, self._call, self._ticket, self._lock = order, call, ticket, lock
        self._callback: Callable[[], None] | None = None
        self._come = ticket is None
        self._waiters = 0
        self.over = threading.Event()
        """The call has begun, or can't."""

    @property
    def ready(self) -> bool:
        """Its sizes are here, or will never be, and there is somebody to begin it."""
        return self._come and self._callback is not None

    def begin(self) -> None:
        """Begin it."""
        assert self._callback is not None
        self._callback()

    def wait(self, timeout: float) -> None:
        """Until the texts are here, and the call has begun.

        :raises StoreTimeoutError: if that is not in ``timeout`` seconds.
        """
        if self._ticket is None:
            if not self.over.wait(timeout):
                raise StoreTimeoutError(
                    f"{self._call}: an earlier call of this rank had not begun after {seconds(timeout)}: it waits for "
                    f"its peers, and calls begin in order"
                )

            return

        with self._lock:
            self._waiters += 1

        try:
            self._ticket.wait(timeout)
        finally:
            come = self._ticket.done()
            with self._lock:
                self._waiters -= 1
                self._come = self._come or come

            self._order.advance()

    def texts(self) -> Sequence[str]:
        """Every rank's text, in rank order."""
        return () if self._ticket is None else texts_of(self._ticket)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it is its turn. Once only."""
        self._callback = callback
        if self._ticket is None:
            self._order.advance()
        else:
            self._ticket.add_done_callback(self._has_come)

    def _has_come(self) -> None:
        with self._lock:
            first, self._come = not self._come, True
            nobody = first and not self._waiters

        if nobody:
            settle_after(lambda: None, lambda _, error: self._order.advance(), "begins a call")
