"""The ticket of a share in joint work of four steps, whose work is done in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import torch

from dtorch_core._joint_shares import Done, Share, Shares, missing
from dtorch_core._text import seconds
from dtorch_core.errors import AbortedError, StoreTimeoutError
from dtorch_core.joint import Ticket, WithEarlier, copy_of

if TYPE_CHECKING:
    from dtorch_core.store import TensorStore


class ThreadTicket(Ticket):
    """A thread works on the share, or gives it up with all others when the wait's time is over."""

    def __init__(self, shares: Shares, store: TensorStore, share: Share, earlier: Sequence[Future[Done]]) -> None:
        self._shares, self._store, self._share, self._future = shares, store, share, share.future
        self._earlier = earlier

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        try:
            error = self._future.exception(timeout)
        except TimeoutError:
            before, what = self._shares.who_gave_up(self._store), missing(self._store, self._share)
            if self._shares.give_up(self._store, self._share, timeout):
                if before is not None and self._share.key not in before.keys:  # heard of too late for the post
                    raise AbortedError(f"{self._me()}: {before.reason}") from None

                raise self.late(what, timeout) from None

            error = self._future.exception()  # it is done, or ends by itself

        if error is not None:
            raise copy_of(error)

        self._future.result().order(stream)

    def notes(self) -> Sequence[str]:
        return self._future.result(timeout=0).notes

    def done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())

    def failed(self) -> bool:
        """It ended badly; of one that is done."""
        return self._future.exception() is not None

    def with_earlier(self) -> Ticket:
        return _ThreadsBefore(self, self._earlier) if self._earlier else self

    def late(self, what: str, timeout: float) -> StoreTimeoutError:
        """The error of a wait in this ticket's name."""
        return StoreTimeoutError(f"{self._me()}: {what} after {seconds(timeout)}")

    def _me(self) -> str:
        return f"{self._store.label}, rank {self._store.rank}, {self._share.key}"


class _ThreadsBefore(WithEarlier):
    """The threads of what was begun before end it."""

    def __init__(self, ticket: ThreadTicket, earlier: Sequence[Future[Done]]) -> None:
        super().__init__(ticket)
        self._own, self._earlier = ticket, earlier

    def _await_earlier(self, timeout: float, stream: torch.cuda.Stream | None) -> None:
        if wait(self._earlier, timeout).not_done:
            raise self._own.late("what this rank had begun before was not done", timeout)

        for future in self._earlier:
            if future.exception() is None:
                future.result().order(stream)

    def _is_over(self) -> bool:
        return self._own.failed() or all(future.done() for future in self._earlier)
