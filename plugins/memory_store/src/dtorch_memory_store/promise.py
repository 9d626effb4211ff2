"""The memory promise: threads of one process, no copy. The outcome goes straight into the future."""

from __future__ import annotations

import itertools
import os
import uuid

from dtorch_core import BackendContext, ProtocolError, TensorFuture, TensorPromise
from dtorch_core.promise import Outcome

_numbers = itertools.count(1)


class MemoryPromises:
    """Makes promises, and keeps those whose right to set is on its way to another holder."""

    def __init__(self, ctx: BackendContext) -> None:
        self._ctx = ctx
        self._handed_over: dict[bytes, _Slot] = {}

    def create(self) -> TensorPromise:
        """A promise with the right to set it."""
        return MemoryPromise(self, self._ctx, _Slot(f"promise {next(_numbers)} of pid {os.getpid()}"))

    def attach(self, token: bytes) -> TensorPromise:
        """The promise that :meth:`hand_over` kept.

        :raises ProtocolError: if another process made the token, or somebody has attached it.
        """
        pid = token.partition(b":")[0].decode(errors="replace")
        if pid != str(os.getpid()):
            raise ProtocolError(
                f"attach_promise: the promise was made in pid {pid}, and this is pid {os.getpid()}; the memory backend "
                f"reaches the threads of one process only: make it with make_promise(reach='process')"
            )

        slot = self._handed_over.pop(token, None)
        if slot is None:
            raise ProtocolError(
                f"attach_promise: no promise of pid {pid} waits for this token: somebody has attached it already, and "
                f"the right to set is handed over once"
            )

        return MemoryPromise(self, self._ctx, slot)

    def hand_over(self, slot: _Slot) -> bytes:
        """Keep the promise until its token is attached."""
        token = f"{os.getpid()}:{uuid.uuid4().hex}".encode()
        self._handed_over[token] = slot
        return token


class MemoryPromise(TensorPromise):
    """One holder's object. What it sets is in the slot, which a handed-over promise shares with its next holder."""

    def __init__(self, home: MemoryPromises, ctx: BackendContext, slot: _Slot) -> None:
        self._home = home
        self._slot = slot
        super().__init__(ctx, slot.label)

    def cancelled(self) -> bool:
        return self._slot.cancelled()

    def take_future(self) -> TensorFuture:
        return self._slot.take()

    def deliver(self, outcome: Outcome) -> None:
        self._slot.settle(outcome)

    def hand_over(self) -> bytes:
        return self._home.hand_over(self._slot)


class _Slot:
    """The future of one promise, until it has been taken and has ended: its value then is the consumers' alone.

    Without a lock, since a promise may be dropped, and settle this, in the midst of any line (collectors and signal
    handlers run anywhere). The one step that has to be atomic is a ``list.pop``.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._future: TensorFuture | None = TensorFuture(label)
        self._untaken = [True]
        self._cancelled = False

    def take(self) -> TensorFuture:
        future = self._future
        try:
            self._untaken.pop()
        except IndexError:
            raise ProtocolError(f"future() of {self.label}: it was taken already; a promise has one future") from None

        assert future is not None, "kept until it is taken"
        self._let_go(future)
        return future

    def settle(self, outcome: Outcome) -> None:
        future = self._future
        if future is not None:
            future.settle(outcome)
            self._let_go(future)

    def cancelled(self) -> bool:
        future = self._future
        return self._cancelled if future is None else future.cancelled()

    def _let_go(self, future: TensorFuture) -> None:
        # Both ends call this when they are done; the later of the two finds that both are.
        if not self._untaken and future.done():
            self._cancelled = future.cancelled()
            self._future = None
