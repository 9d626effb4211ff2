"""The c10d Works of this group."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core import CollectiveMismatchError, DtorchError, StoreTimeoutError, TensorStore, streams
from dtorch_core._copies import copy_into
from dtorch_core._futures import settle_after
from dtorch_core._shapes import describe
from dtorch_core._text import interruption
from dtorch_core.joint import Ticket
from dtorch_core.mail import Receipt
from dtorch_samedevice_group.arguments import plain
from dtorch_samedevice_group.aside import Behind, on

_init = dist._Work.__init__

_making_futures = threading.Lock()
"""One for all Works: few are asked for a future, and making it takes a moment."""


class Waited(dist._Work):
    """What the Works here share: all of it follows from a wait that can be repeated."""

    _future: torch.futures.Future[list[Tensor]] | None = None
    range: AbstractContextManager[Any] | None = None
    """What a profiler is to see of the first wait."""

    def __init__(self, outputs: Sequence[Tensor], timeout: float) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._timeout = timeout

    def _end(self, timeout: float) -> None:
        """Wait for the end."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the result; on CUDA make the current stream wait instead of the host.

        :raises StoreTimeoutError: if ranks have not come in time; they are named.
        """
        if self.range is not None:
            return self._wait_in_range(self.range, timeout)

        self._end(seconds_of(timeout, self._timeout))
        return True

    def _wait_in_range(self, seen: AbstractContextManager[Any], timeout: timedelta | float | None) -> bool:
        self.range = None
        with seen:
            return self.wait(timeout)

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What the work raised; None if it is not done, or done well."""
        if not self.is_completed():
            return None

        try:
            self._end(0)
        except Exception as error:
            return error

        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        return -1

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the list of output tensors, as c10d's."""
        with _making_futures:
            if self._future is not None:
                return self._future

            future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=self._devices() or None)  # type: ignore[arg-type]
            self._future = future

        # Its callbacks may call collectives and wait for them. So the thread in which they run is the rank's, and no
        # other work waits for it.
        beside = self._streams_beside()
        if self.is_completed():
            with on(beside):
                self._fulfil(future, self.exception())

            return future

        def wait() -> None:
            with on(beside):
                self.wait()

        def settle(_: None, error: Exception | None) -> None:
            with on(beside):
                self._fulfil(future, error)

        settle_after(wait, settle, "a future's wait")
        return future

    def _fulfil(self, future: torch.futures.Future[list[Tensor]], error: Exception | None) -> None:
        """Once waited for: that orders the current stream after the work; the future records it for its consumers."""
        if error is not None:
            _Failed(error).settle(future)
        else:
            future.set_result(self._outputs)

    def _devices(self) -> list[torch.device]:
        """The GPUs that outputs may be on."""
        return sorted({tensor.device for tensor in self._outputs if tensor.is_cuda}, key=str)

    def _streams_beside(self) -> list[torch.cuda.Stream]:
        """Streams for a future to wait on, where it need not be on those of whoever asks for it: they go on then."""
        return []


class _Failed:
    """What a future of a failed work holds: to a future that Python makes, an error is a value like any other.

    C++, as in DDP, does not ask for it as Python does. It pickles the value to find its tensors, and takes the first.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._settling: int | None = None

    def settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        """Python then raises the error as it is, and C++ an error with its text."""
        future._set_unwrap_func(_Failed.value)
        self._settling = threading.get_ident()
        try:
            future.set_result(self)  # type: ignore[arg-type]
        finally:
            self._settling = None

    def value(self) -> NoReturn:
        raise self._error

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if self._settling == threading.get_ident():  # a future of CUDA tensors looks for them while it is set
            return tuple, ()

        raise self._error


class GroupWork(Waited):
    """Waits for a ticket."""

    waited_in: tuple[TensorStore, str] | None = None
    """The call's store and note, if its caller waits at once, and drops this."""

    def __init__(self, ticket: Ticket, outputs: list[Tensor], timeout: float) -> None:
        _init(self)  # as Waited does: small collectives cost what Python costs
        self._ticket = ticket
        self._outputs = outputs
        self._timeout = timeout

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self.range is not None:
            return self._wait_in_range(self.range, timeout)

        try:
            self._ticket.wait(self._timeout if timeout is None else seconds_of(timeout, self._timeout))
        except StoreTimeoutError as error:
            raise StoreTimeoutError(f"{error} (the timeout of this call)") from None  # a word that programs look for
        except BaseException as error:
            if self.waited_in is not None and not isinstance(error, DtorchError) and not self._ticket.done():
                self._give_up(*self.waited_in, error)

            raise

        return True

    def _give_up(self, store: TensorStore, note: str, error: BaseException) -> None:
        """A signal's handler, as of Ctrl-C, takes the caller out of a call that it can't wait for again: its peers are
        woken. Its tensors are its own when this returns."""
        store.abort(interruption(store.rank, note.partition("\n")[0], error))
        with suppress(Exception):
            self._ticket.wait(self._timeout)  # for what is being done with them

    def include_earlier(self, aside: Sequence[Ticket]) -> None:
        """It is over no sooner than what this rank has begun before. Called by whoever has posted it, at once.

        :param aside: of that, what is on streams aside.
        """
        ticket = self._ticket.with_earlier()
        self._ticket = Behind(ticket, aside) if aside else ticket

    def is_completed(self) -> bool:
        return self._ticket.done()

    def _end(self, timeout: float) -> None:
        self._ticket.wait(timeout)

    def _streams_beside(self) -> list[torch.cuda.Stream]:
        devices = self._devices()
        if devices and torch.cuda.is_current_stream_capturing():
            return []  # one that nobody waited for would be a part of the graph that never comes back to it

        return [torch.cuda.Stream(device) for device in devices]


class SendWork(Waited):
    """A send: over when it returns, since the message is a copy."""

    def __init__(self) -> None:
        super().__init__((), 0)

    def is_completed(self) -> bool:
        return True

    def _end(self, timeout: float) -> None:
        return


class ReceiveWork(Waited):
    """A receive: into the caller's buffer, or, without one, whatever arrives."""

    def __init__(
        self,
        receipt: Receipt,
        buffer: Tensor | None,
        device: str,
        timeout: float,
        call: str,
        of_its_shape: bool = True,
    ) -> None:
        """
        :param of_its_shape: the message has the buffer's shape. Else as many elements will do, as in c10d: torch's own
            pipelines send a number without dimensions into a buffer of one element.
        """
        super().__init__([] if buffer is None else [buffer], timeout)
        self._of_its_shape = of_its_shape
        self._receipt, self._buffer, self._device, self._call = receipt, buffer, torch.device(device), call
        self._storing = threading.Lock()
        self._source = -1
        self._received: Tensor | None = None
        self._stored: torch.cuda.Event | None = None

    def is_completed(self) -> bool:
        return self._receipt.done()

    def cancel(self) -> bool:
        """Expect the message no more; False if it is here."""
        return self._receipt.cancel()

    def _source_rank(self) -> int:
        return self._source

    def _devices(self) -> list[torch.device]:
        return [self._device] if self._device.type == "cuda" else super()._devices()

    def _end(self, timeout: float) -> None:
        message, source = self._receipt.wait(timeout)
        with self._storing:
            if self._received is None:
                self._source = source
                self._outputs = [self._store(message, source)]
                self._received = message
            elif self._buffer is not None:
                streams.order_after(self._stored, self._buffer)  # this thread's stream may be another one

    def _store(self, message: Tensor, source: int) -> Tensor:
        buffer = self._buffer
        if buffer is None:
            return message

        fits = buffer.shape == message.shape or (not self._of_its_shape and buffer.numel() == message.numel())
        if not fits or buffer.dtype != message.dtype:
            raise CollectiveMismatchError(
                f"{self._call}: rank {source} sent {describe(message)}, and the buffer is {describe(buffer)}"
            )

        with torch.inference_mode(buffer.is_inference()):  # a future's wait is in a thread of its own
            copy_into(plain(buffer), message.reshape(buffer.shape))

        self._stored = streams.record(buffer)
        return buffer


class AllOf(Waited):
    """Several Works as one."""

    def __init__(self, works: Sequence[Waited], timeout: float) -> None:
        super().__init__((), timeout)
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def _end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for work in self._works:
            work._end(max(deadline - time.monotonic(), 0))

        self._outputs = self.result()

    def _devices(self) -> list[torch.device]:
        return sorted({device for work in self._works for device in work._devices()}, key=str)


def seconds_of(timeout: timedelta | float | None, default: float) -> float:
    """c10d writes "no timeout of its own" as zero, a negative time, or nothing at all."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return value if value is not None and value > 0 else default
