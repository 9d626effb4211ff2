"""Work: what a ThreadGroup's call with ``async_op=True`` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dtorch_core._futures import settle_after
from dtorch_core._groups.notes import Notes
from dtorch_core._groups.order import Turn
from dtorch_core.checks import check_timeout
from dtorch_core.errors import DtorchError, StoreTimeoutError
from dtorch_core.extras import Companion
from dtorch_core.recorder import Entry, Recorder

T = TypeVar("T")
Started = tuple[dist.Work, Callable[[], T]]
"""A c10d Work under way, and what gives the result of the call once it is done; that may be asked more than once."""


class Record(NamedTuple):
    """What the flight recorder has of a call."""

    recorder: Recorder
    entry: Entry

    def explain(self, error: BaseException) -> None:
        """The call raised: note it, and say in the error what the ranks did last."""
        self.entry.end(error)
        if isinstance(error, DtorchError):
            self.recorder.explain(error)


class Work(Generic[T]):
    """A collective under way. Many may be; each ends by itself, whether anybody waits for it or not."""

    def __init__(
        self,
        call: str,
        notes: Notes | Turn | None,
        start: Callable[[Sequence[str]], Started[T]],
        timeout: float,
        device: str,
        record: Record | None = None,
        beside: Companion | None = None,
    ) -> None:
        self._call = call
        self._notes, self._timeout, self._record, self._beside = notes, timeout, record, beside
        self._device = torch.device(device)
        self._started: Future[Started[T]] = Future()
        self._lost = False
        """What was to come first never will."""
        if notes is None:
            try:
                self._started.set_result(start(()))
            except Exception as error:
                raise self._explained(error) from error.__cause__

            return

        # What follows an exchange is begun by whichever thread ends the exchange, but as this rank's thread would.
        # Only until then: it knows the group, which a thread of the process group must not be the last to let go of.
        self._start: Callable[[Sequence[str]], Started[T]] | None = start
        self._inference = torch.is_inference_mode_enabled()
        self._on_own_stream: Callable[[], AbstractContextManager[object]] = nullcontext
        if self._device.type == "cuda":
            self._on_own_stream = partial(torch.cuda.stream, torch.cuda.current_stream(self._device))

        begin = [self._begin]  # let go of as it is called: this Work knows the notes, which keep what they call
        notes.add_done_callback(lambda: begin.pop()())

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end; True. On CUDA the current stream waits, the host does not.

        :param timeout: seconds; the call's own where None.
        :raises StoreTimeoutError: if ranks have not come in time; they are named.
        :raises ValueError: if ``timeout`` is negative or not finite.
        """
        try:
            self._wait(timeout)
        except Exception as error:
            raise self._explained(error) from error.__cause__

        if self._record is not None:
            self._record.entry.end()

        return True

    def result(self) -> T:
        """What the blocking call returns; waits for it."""
        self.wait()
        return self._started.result()[1]()

    def __repr__(self) -> str:
        if self._started.done() and (error := self._started.exception()) is not None:
            return f"<Work {self._call}: failed with {type(error).__name__}>"

        return f"<Work {self._call}: {'over' if self.is_completed() else 'under way'}>"

    @property
    def has_begun(self) -> bool:
        """What came first is over, and c10d's collective begun; or it never will be."""
        return self._started.done()

    def is_completed(self) -> bool:
        """It is over, well or not."""
        if not self._started.done():
            return self._lost

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
        devices = [self._device] if self._device.type == "cuda" else None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]

        def follow(started: Future[Started[T]]) -> None:
            try:
                work, finish = started.result()
                ended = work.get_future()
            except Exception as error:  # of any kind: in the thread that waits, nobody would hear of it
                future.set_exception(self._explained(error))
                return

            def fulfil(done: torch.futures.Future[Any]) -> None:
                try:
                    done.value()  # raises what the work raised; waiting for the work could be waiting for this callback
                    future.set_result(finish())
                except Exception as error:
                    future.set_exception(self._explained(error))

            ended.add_done_callback(fulfil)

        notes = self._notes
        if notes is None or self._started.done():
            follow(self._started)
            return future

        def wait() -> None:
            self._await_notes(notes, self._timeout)
            self._started.exception(self._timeout)

        def settle(_: None, error: Exception | None) -> None:
            if error is not None:
                future.set_exception(self._explained(error))
            else:
                follow(self._started)

        # Its callbacks may call collectives and wait for them: not in the thread that begins this one, which is another
        # rank's, or has others to begin.
        settle_after(wait, settle, "a future's wait")
        return future

    def _wait(self, timeout: float | timedelta | None) -> None:
        seconds = self._timeout
        if timeout is not None:
            given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            seconds = check_timeout(f"{self._call}: wait", given)

        deadline = time.monotonic() + seconds
        if self._notes is not None:
            self._await_notes(self._notes, _left(deadline))

        # All have come: what has to happen before it has begun waits for no other rank.
        try:
            work, finish = self._started.result(max(self._timeout, _left(deadline)))
        except TimeoutError as error:
            if self._started.done():
                raise  # what it raised

            raise StoreTimeoutError("the sizes are here, but this call's second part has not begun in time") from error

        work.wait(timedelta(seconds=_left(deadline)))
        finish()

    def _await_notes(self, notes: Notes | Turn, timeout: float) -> None:
        try:
            notes.wait(timeout)
        except StoreTimeoutError:
            raise  # of an earlier call, maybe
        except DtorchError:
            self._lost = True  # the thread that is to say so may come later than this one
            raise

    def _explained(self, error: Exception) -> Exception:
        """What to raise for it: with more in its message, or another one."""
        if self._beside is not None:
            error = self._beside.explain(self._call, error)

        if self._record is not None:
            self._record.explain(error)

        return error

    def _begin(self) -> None:
        start, self._start = self._start, None
        assert self._notes is not None and start is not None
        try:
            with torch.inference_mode(self._inference), self._on_own_stream():
                started = start(self._notes.texts())
        except BaseException as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(started)


def _left(deadline: float) -> float:
    # Never zero: to c10d that means "no timeout of its own".
    return max(0.001, deadline - time.monotonic())
