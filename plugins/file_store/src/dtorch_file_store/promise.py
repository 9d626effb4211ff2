"""The file promise: processes of one host. What never leaves its process goes straight into the future."""

from __future__ import annotations

import itertools
import json
import os
import secrets

from dtorch_core import BackendContext, DtorchError, ProtocolError, TensorFuture, TensorPromise
from dtorch_core._promise_slot import Slot
from dtorch_core.promise import Outcome
from dtorch_file_store import promise_server
from dtorch_file_store.promise_cuda import Courier
from dtorch_file_store.promise_line import Line, Ticket, connect, here
from dtorch_file_store.promise_packets import pack
from dtorch_file_store.wire import frame

_numbers = itertools.count(1)


class FilePromises:
    """Makes promises, and attaches those of this host's processes."""

    def __init__(self, ctx: BackendContext) -> None:
        self._ctx = ctx

    def create(self) -> TensorPromise:
        """A promise with the right to set it."""
        return OwnPromise(self._ctx, Slot(f"promise {next(_numbers)} of pid {os.getpid()}"))

    def attach(self, token: bytes) -> TensorPromise:
        """The promise that a process of this host has handed over.

        :raises ProtocolError: if it is no token, somebody has attached it, or its maker is out of reach.
        :raises PeerLostError: if the process that made the promise is gone.
        :raises StoreTimeoutError: if that process does not answer.
        """
        ticket = _parsed(token)
        slot = promise_server.claim(ticket.address, ticket.secret)
        if slot is not None:
            return OwnPromise(self._ctx, slot)

        line = connect(ticket, self._ctx.timeout) if ticket.address else None
        return HeldPromise(self._ctx, ticket, line)


class OwnPromise(TensorPromise):
    """In the process that made it: what it sets is in the slot, which a handed-over promise shares with its holder."""

    def __init__(self, ctx: BackendContext, slot: Slot) -> None:
        self._slot = slot
        super().__init__(ctx, slot.label)

    def cancelled(self) -> bool:
        return self._slot.cancelled()

    def take_future(self) -> TensorFuture:
        return self._slot.take()

    def deliver(self, outcome: Outcome) -> None:
        self._slot.settle(outcome)

    def hand_over(self) -> bytes:
        address, secret = promise_server.offer(self._slot)
        return _token(Ticket(self.label, here(), os.getpid(), address, secret))


class HeldPromise(TensorPromise):
    """In another process: what it sets goes to the one that made it."""

    def __init__(self, ctx: BackendContext, ticket: Ticket, line: Line | None) -> None:
        """
        :param line: None if the future was cancelled before.
        """
        self._ticket = ticket
        self._line = line
        self._courier: Courier | None = None
        super().__init__(ctx, ticket.label)

    @property
    def detour(self) -> str:
        """Why a CUDA value went through the host's memory; empty where it did not, and until that is known."""
        return self._courier.detour if self._courier is not None else ""

    def cancelled(self) -> bool:
        return self._line is None or self._line.cancelled()

    def take_future(self) -> TensorFuture:
        raise ProtocolError(
            f"future() of {self.label}: its future is in pid {self._ticket.pid}, which made it, and this is pid "
            f"{os.getpid()}; take it there"
        )

    def deliver(self, outcome: Outcome) -> None:
        if self._line is None:
            return

        if self._line.cancelled():
            self._line.close()
            return

        if outcome.tensor is not None and outcome.ready is not None:
            self._courier = Courier(self.label, self._line.part(), outcome.tensor, outcome.ready)
            self._courier.begin()
            return

        packet, fd = pack(f"set_result of {self.label}", outcome)
        try:
            self._line.send(packet, fd)
        except OSError as error:
            raise DtorchError(f"{self.label}: its outcome can't be sent to pid {self._ticket.pid}: {error}") from error
        finally:
            if fd is not None:
                os.close(fd)

    def hand_over(self) -> bytes:
        secret = secrets.token_hex(16)
        if self._line is not None and self._line.send(frame("handed over", secret)):
            return _token(self._ticket._replace(secret=secret))

        return _token(self._ticket._replace(address="", secret=""))


def _token(ticket: Ticket) -> bytes:
    return json.dumps(ticket).encode()


def _parsed(token: bytes) -> Ticket:
    try:
        ticket = Ticket(*json.loads(token))
        if [type(field) for field in ticket] == [str, str, int, str, str]:
            return ticket
    except (ValueError, TypeError, RecursionError):
        pass

    raise ProtocolError("attach_promise: this is no token of a file promise; pass what serialize() returned, unchanged")
