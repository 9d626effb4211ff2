"""Work: what a ThreadGroup's call with ``async_op=True`` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from dtorch_core._notes import Notes
from dtorch_core.errors import StoreTimeoutError

T = TypeVar("T")
Started = tuple[dist.Work, Callable[[], T]]
"""A c10d Work under way, and what makes the result of the call once it is done."""


class Work(Generic[T]):
    """A collective under way. Many may be; each ends by itself, whether anybody waits for it or not."""

    def __init__(self, notes: Notes | None, start: Callable[[Sequence[str]], Started[T]], timeout: float) -> None:
        self._notes, self._start, self._timeout = notes, start, timeout
        self._started: Future[Started[T]] = Future()
        self._result: list[T] = []
        # What follows an exchange is queued by whichever thread ends the exchange, but on this rank's stream.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        if notes is None:
            self._started.set_result(start(()))
        else:
            notes.add_done_callback(self._begin)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end; True. On CUDA the current stream waits, the host does not.

        :param timeout: seconds; the call's own where None.
        :raises StoreTimeoutError: if ranks have not come in time; they are named.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deadline = time.monotonic() + (self._timeout if seconds is None else seconds)
        if self._notes is not None:
            self._notes.wait(_left(deadline))

        try:
            work, _ = self._started.result(_left(deadline))
        except TimeoutError as error:
            raise StoreTimeoutError("the sizes are here, but this call's second part has not begun in time") from error

        work.wait(timedelta(seconds=_left(deadline)))
        return True

    def result(self) -> T:
        """What the blocking call returns; waits for it."""
        self.wait()
        if not self._result:
            self._result.append(self._started.result()[1]())

        return self._result[0]

    def is_completed(self) -> bool:
        """It is over, well or not."""
        if not self._started.done():
            return False

        return self._started.exception() is not None or self._started.result()[0].is_completed()

    def exception(self) -> BaseException | None:
        """What it raised; None if it is under way or went well."""
        if not self.is_completed():
            return None

        try:
            self.wait()
        except Exception as error:
            return error

        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """A torch future of the result."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def fulfil(_: object = None) -> None:
            try:
                future.set_result(self.result())
            except Exception as error:
                future.set_exception(error)

        def follow(started: Future[Started[T]]) -> None:
            if started.exception() is None:
                started.result()[0].get_future().add_done_callback(fulfil)
            else:
                fulfil()

        self._started.add_done_callback(follow)
        return future

    def _begin(self) -> None:
        assert self._notes is not None
        try:
            with torch.cuda.stream(self._stream):
                started = self._start(self._notes.texts())
        except BaseException as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(started)


def _left(deadline: float) -> float:
    # Never zero: to c10d that means "no timeout of its own".
    return max(0.001, deadline - time.monotonic())
