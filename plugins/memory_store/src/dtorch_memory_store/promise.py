"""The memory promise: threads of one process, no copy. The outcome goes straight into the future."""

from __future__ import annotations

import itertools
import os
import uuid

from dtorch_core import BackendContext, ProtocolError, TensorFuture, TensorPromise
from dtorch_core._promise_slot import Slot
from dtorch_core.promise import Outcome

_numbers = itertools.count(1)


class MemoryPromises:
    """Makes promises, and keeps those whose right to set is on its way to another holder."""

    def __init__(self, ctx: BackendContext) -> None:
        self._ctx = ctx
        self._handed_over: dict[bytes, Slot] = {}

    def create(self) -> TensorPromise:
        """A promise with the right to set it."""
        return MemoryPromise(self, self._ctx, Slot(f"promise {next(_numbers)} of pid {os.getpid()}"))

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

    def hand_over(self, slot: Slot) -> bytes:
        """Keep the promise until its token is attached."""
        token = f"{os.getpid()}:{uuid.uuid4().hex}".encode()
        self._handed_over[token] = slot
        return token


class MemoryPromise(TensorPromise):
    """One holder's object. What it sets is in the slot, which a handed-over promise shares with its next holder."""

    def __init__(self, home: MemoryPromises, ctx: BackendContext, slot: Slot) -> None:
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
