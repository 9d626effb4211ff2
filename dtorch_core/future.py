"""The consumer's side of a promise: a ``concurrent.futures.Future`` that can be awaited and knows CUDA streams.

Nobody polls and nothing runs in the background: each wait leaves a :class:`_Sleeper`, and whoever ends the future
wakes them all. A wait first registers and then looks, so no end can slip in between.
"""

from __future__ import annotations

import _thread
import asyncio
import copy
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from dtorch_core import _scope, streams
from dtorch_core._selection.reasons import CAPABILITIES, Selection
from dtorch_core._text import seconds
from dtorch_core.errors import AbortedError, ProtocolError, StoreTimeoutError, UnsupportedOperationError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a promise brings: a tensor, nothing (the void promise), or an error."""

    tensor: Tensor | None = None
    ready: torch.cuda.Event | None = None
    """Done when a CUDA ``tensor`` holds its value; None on the CPU."""
    error: BaseException | None = None


class TensorFuture(Future[Tensor | None]):
    """A tensor that will come, or None from a void promise.

    ``done()`` means that the value is there; on CUDA the work that writes it may still run. The result is read-only:
    other consumers see the same memory. A wait without ``timeout`` has no limit: the holder of the promise ends it, or
    the loss of that holder does. In a rank of :func:`dtorch_core.spawn` the end of the run ends every wait, too.

    A process that is forked has a copy that nobody ends: what has not ended before the fork can't be waited for there.
    """

    selection: Selection
    """Why this backend carries it."""

    def __init__(self, label: str) -> None:
        """
        :param label: how messages call the promise: ``"promise 3 of pid 12"``.
        """
        super().__init__()
        self.label = label
        self.capabilities: frozenset[str] = CAPABILITIES["promise"]
        self._pid = os.getpid()
        self._sleepers: dict[_Sleeper, None] = {}
        self._told = False
        self._traceback: TracebackType | None = None
        super().add_done_callback(_wake_all)

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.selection.chosen or ""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended, in whatever way; False if that has not happened within ``timeout`` seconds.

        :raises AbortedError: if the run of the rank that waits was ended meanwhile.
        :raises ProtocolError: in a process that was forked before it had ended; as every wait does.
        :raises TypeError: if ``timeout`` is no number of seconds.
        """
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float, NoneType)) or timeout != timeout:
            raise TypeError(f"{self.label}: timeout must be a number of seconds or None, not {timeout!r}")

        if self.done():
            return True

        self._refuse_fork("a wait for the result")
        gate = threading.Lock()
        gate.acquire()
        sleeper = _Sleeper(gate.release)
        try:
            self._enrol(sleeper)
            gate.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX))
        finally:
            self._sleepers.pop(sleeper, None)

        return self.done() or self._unless_aborted(sleeper)

    def result(self, timeout: float | None = None) -> Tensor | None:
        """The value, each time the same. On CUDA the caller's current stream is made to wait for it, the host is not.

        :raises StoreTimeoutError: if it has not come within ``timeout`` seconds; the call can be repeated.
        :raises BrokenPromiseError: if the promise was dropped unset, or its holder died.
        :raises concurrent.futures.CancelledError: if this future was cancelled.
        :raises BaseException: what was given to ``set_exception``.
        """
        error = self.exception(timeout)
        if error is not None:
            try:
                raise _fresh(error, self._traceback)
            finally:
                del self, error  # or the traceback and the error it belongs to would keep each other alive

        outcome: Any = super().result(0)
        tensor: Tensor | None = outcome.tensor
        if tensor is None:
            return None

        if outcome.ready is not None:
            streams.order_after(outcome.ready, tensor)
            streams.keep_until_done(tensor)

        return tensor.detach()  # an alias of each caller's own: metadata is not shared

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that it ended with, or None. Raises as :meth:`result` does for a timeout and a cancelled future."""
        if not self.wait(timeout):
            raise StoreTimeoutError(
                f"{self.label}: no result after {seconds(timeout or 0)}: its holder has not set it yet; "
                f"the call can be repeated"
            )

        if self.cancelled():
            raise CancelledError(f"{self.label}: its future was cancelled")

        return super().exception(0)

    def cancel(self) -> bool:
        """End this future and tell the promise, whose result is then dropped; False if it has ended already."""
        if not self.done():
            self._refuse_fork("cancel()")

        if not super().cancel():
            return False

        with self._condition:
            first, self._told = not self._told, True
            if first:
                super().set_running_or_notify_cancel()  # concurrent.futures.wait() hears of it only by this

        return True

    def __await__(self) -> Generator[Any, None, Tensor | None]:
        """Wait in an event loop, any number of them at once. A cancelled await leaves the future as it is.

        :raises UnsupportedOperationError: if the backend does not declare ``"await"``.
        """
        if "await" not in self.capabilities:
            raise UnsupportedOperationError(
                f"{self.label}: the promise backend {self.backend!r} does not declare 'await'; call result()"
            )

        if not self.done():
            self._refuse_fork("an await of the result")
            loop = asyncio.get_running_loop()
            # A loop future of this await's own: cancelling it, or leaving it behind, touches nobody else.
            arrived = loop.create_future()
            sleeper = _Sleeper(lambda: _tell(loop, arrived))
            try:
                self._enrol(sleeper)
                yield from arrived
            finally:
                self._sleepers.pop(sleeper, None)

            if not self.done():
                self._unless_aborted(sleeper)

        return self.result(0)

    def settle(self, outcome: Outcome) -> bool:
        """For backends: end it. False, and nothing happens, if it was cancelled or has ended already."""
        if self._condition._is_owned():  # type: ignore[attr-defined]
            # A finalizer or a signal handler interrupted this thread amid a change of this very future, which may
            # have just seen that it is pending. The end has to come after that change.
            _thread.start_new_thread(self._end, (outcome,))
            return True

        return self._end(outcome)

    def set_result(self, result: object) -> NoReturn:
        """Not for consumers. :raises ProtocolError: always."""
        raise ProtocolError(f"{self.label}: a future is ended by its promise: TensorPromise.set_result()")

    def set_exception(self, exception: object) -> NoReturn:
        """Not for consumers. :raises ProtocolError: always."""
        raise ProtocolError(f"{self.label}: a future is ended by its promise: TensorPromise.set_exception()")

    def set_running_or_notify_cancel(self) -> NoReturn:
        """Not for consumers. :raises ProtocolError: always."""
        raise ProtocolError(f"{self.label}: no executor runs its future; cancel() works until it has ended")

    def _get_snapshot(self) -> tuple[bool, bool, Tensor | None, BaseException | None]:
        """Done, cancelled, result, error: ``asyncio.wrap_future`` of Python 3.14 asks for these instead of result()."""
        if not self.done() or self.cancelled():
            return self.done(), self.cancelled(), None, None

        error = super().exception(0)
        return True, False, self.result(0) if error is None else None, error

    def _end(self, outcome: Outcome) -> bool:
        with suppress(InvalidStateError):
            if outcome.error is None:
                super().set_result(outcome)  # type: ignore[arg-type]
            else:
                self._traceback = self._traceback if self.done() else outcome.error.__traceback__
                super().set_exception(outcome.error)

            return True

        return False

    def _enrol(self, sleeper: _Sleeper) -> None:
        """Wake ``sleeper`` when this ends, which may be now, or when the rank's run does."""
        self._sleepers[sleeper] = None
        scope = _scope.current()
        if scope is not None:
            scope.add(sleeper)

        if self.done():
            sleeper.wake()

    def _refuse_fork(self, call: str) -> None:
        if os.getpid() != self._pid:
            raise ProtocolError(
                f"{call} of {self.label}: its future is in pid {self._pid}, and this is pid {os.getpid()}, forked from "
                f"it: nobody ends the copy here. Make the promise in the process that waits, and hand it over by "
                f"serialize()"
            )

    def _unless_aborted(self, sleeper: _Sleeper) -> bool:
        if sleeper.reason is not None:
            raise AbortedError(f"{self.label}: the wait for its result was ended: {sleeper.reason}")

        return False

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.label}: a TensorFuture can't be pickled or copied; hand over the promise: serialize()")

    def __repr__(self) -> str:
        if not self.done():
            state = "pending"
        elif self.cancelled():
            state = "cancelled"
        else:
            error = super().exception(0)
            state = "there" if error is None else f"failed with {type(error).__name__}"

        return f"<TensorFuture of {self.label}: {state}>"


class _Sleeper:
    """One wait on one future. A rank's scope knows it as something to abort."""

    __slots__ = ("__weakref__", "_wake", "reason")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.reason: str | None = None
        """Why it was woken before the future ended."""

    def wake(self) -> None:
        """Let it look again. May be called more than once, from any thread."""
        with suppress(RuntimeError):  # woken already; or its event loop is closed, and nobody waits there any more
            self._wake()

    def abort(self, reason: str, *, died: bool = False) -> None:
        """End the wait, not the future."""
        self.reason = self.reason or reason
        self.wake()


def _wake_all(future: Future[Tensor | None]) -> None:
    assert isinstance(future, TensorFuture)
    for sleeper in list(future._sleepers):
        future._sleepers.pop(sleeper, None)  # an await in a loop that was closed does not come to do it
        sleeper.wake()


def _tell(loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None]) -> None:
    def arrive() -> None:
        if not arrived.done():  # cancelled meanwhile
            arrived.set_result(None)

    loop.call_soon_threadsafe(arrive)


def _fresh(error: BaseException, traceback: TracebackType | None) -> BaseException:
    """The error for one caller to raise: a copy, so that callers don't write into each other's traceback."""
    try:
        twin = copy.copy(error)
        alike = type(twin) is type(error) and twin.args == error.args and str(twin) == str(error)
    except Exception:
        alike = False

    if not alike:
        # Its constructor takes other arguments than it keeps. At least its traceback does not grow.
        return error.with_traceback(traceback)

    if hasattr(twin, "__notes__"):
        twin.__notes__ = list(twin.__notes__)

    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(traceback)
