"""The c10d Work of one collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core import CollectiveMismatchError
from dtorch_core.joint import Ticket
from dtorch_core.mail import Receipt


class GroupWork(dist._Work):
    """Waits for a ticket; its future carries the list of output tensors, as c10d's do."""

    def __init__(self, ticket: Ticket, outputs: Sequence[Tensor], timeout: float, source: int = -1) -> None:
        super().__init__()
        self._ticket = ticket
        self._outputs = list(outputs)
        self._timeout = timeout
        self._source = source
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the result; on CUDA make the current stream wait instead of the host.

        :raises StoreTimeoutError: if ranks have not come in time; they are named.
        """
        self._ticket.wait(seconds_of(timeout, self._timeout))
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        return self._ticket.done()

    def is_success(self) -> bool:
        return self._ticket.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the work raised; None if it is not done, or done well."""
        if not self._ticket.done():
            return None

        try:
            self._ticket.wait(0)
        except Exception as error:
            return error

        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        if self._future is None:
            devices = sorted({tensor.device for tensor in self._outputs if tensor.is_cuda}, key=str)
            future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices or None)  # type: ignore[arg-type]
            self._future = future
            self._ticket.add_done_callback(lambda: self._fulfil(future))

        return self._future

    def _fulfil(self, future: torch.futures.Future[list[Tensor]]) -> None:
        try:
            # Orders the current stream after the work; the future records it there for its consumers.
            self._ticket.wait(0)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)


class SendWork(dist._Work):
    """A send: over when it returns, since the message is a copy."""

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class ReceiveWork(GroupWork):
    """A receive: into the caller's buffer, or, without one, whatever arrives."""

    def __init__(self, receipt: Receipt, buffer: Tensor | None, timeout: float, call: str) -> None:
        super().__init__(_ReceiptTicket(receipt), [] if buffer is None else [buffer], timeout)
        self._receipt, self._buffer, self._call = receipt, buffer, call
        self._lock = threading.Lock()
        self._received = False

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        message, source = self._receipt.wait(seconds_of(timeout, self._timeout))
        with self._lock:
            if not self._received:
                self._source = source
                self._outputs = [self._stored(message, source)]
                self._received = True

        return True

    def cancel(self) -> bool:
        """Expect the message no more; False if it is here."""
        return self._receipt.cancel()

    def _stored(self, message: Tensor, source: int) -> Tensor:
        if self._buffer is None:
            return message

        buffer = self._buffer.detach()
        if buffer.shape != message.shape or buffer.dtype != message.dtype:
            raise CollectiveMismatchError(
                f"{self._call}: rank {source} sent {message.dtype} {list(message.shape)}, and the buffer is "
                f"{buffer.dtype} {list(buffer.shape)}"
            )

        buffer.copy_(message)
        return self._buffer

    def _fulfil(self, future: torch.futures.Future[list[Tensor]]) -> None:
        try:
            self.wait(0.001)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)


class _ReceiptTicket(Ticket):
    """A receipt as a ticket, for what a Work asks of either."""

    def __init__(self, receipt: Receipt) -> None:
        self._receipt = receipt

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        self._receipt.wait(timeout, stream)

    def notes(self) -> Sequence[str]:
        return ()

    def done(self) -> bool:
        return self._receipt.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._receipt.add_done_callback(callback)


class Together(dist._Work):
    """Several Works as one."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return all([work.wait(timeout) for work in self._works])

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self.result())


def together(works: Sequence[GroupWork]) -> dist._Work:
    """One Work for several."""
    return works[0] if len(works) == 1 else Together(works)


def seconds_of(timeout: timedelta | float | None, default: float) -> float:
    """c10d writes "no timeout of its own" as zero, a negative time, or nothing at all."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return value if value is not None and value > 0 else default
