"""Messages between ranks that have a GPU each: through the control store, so that a send waits for nobody."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dtorch_core import CollectiveMismatchError, streams
from dtorch_core._copies import copy_into
from dtorch_core._futures import future_of
from dtorch_core._shapes import Shape, describe
from dtorch_core.mail import Receipt


class MessageWork:
    """A receive: into the caller's memory, or, without any, whatever arrives. On this rank's device in the end."""

    def __init__(self, receipt: Receipt, out: Tensor | None, device: torch.device, timeout: float, label: str) -> None:
        self._receipt, self._out, self._device, self._timeout, self._label = receipt, out, device, timeout, label
        self._lock = threading.Lock()
        self._result: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self._source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message; on CUDA the current stream is ordered after it."""
        # On a stream of this rank: those of the sender's GPU may be behind kernels that wait for this rank.
        queue = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        message, source = self._receipt.wait(seconds, queue)
        with self._lock:
            if self._result is None:
                self._source = source
                self._result = self._stored(self._here(message, queue), source)
                self._ready = streams.record(self._result)
            else:
                streams.order_after(self._ready, self._result)  # this thread's stream may be another one

        return True

    def result(self) -> list[Tensor | None]:
        """The message, once it was waited for."""
        return [self._result]

    def is_completed(self) -> bool:
        return self._receipt.done()

    def cancel(self) -> bool:
        """Expect the message no more; False if it is here."""
        return self._receipt.cancel()

    def get_future(self) -> torch.futures.Future[Any]:
        """Done when the message is here, or its time is over."""

        def received() -> list[Tensor | None]:
            self.wait()
            return self.result()

        return future_of(received, "a message's wait", [self._device] if self._device.type == "cuda" else ())

    def _source_rank(self) -> int:
        return self._source

    def _here(self, message: Tensor, queue: torch.cuda.Stream | None) -> Tensor:
        if message.device == self._device:
            return message

        # It lies on its sender's GPU, and is this rank's: it goes when it has been copied.
        copy, done = streams.copy_to_device(message, self._device, queue)
        streams.order_after(done, copy)
        return copy

    def _stored(self, message: Tensor, source: int) -> Tensor:
        if self._out is None:
            return message

        if Shape.of(self._out) != Shape.of(message):
            raise CollectiveMismatchError(
                f"{self._label}: rank {source} sent {describe(message)}, and out= is {describe(self._out)}"
            )

        copy_into(self._out.detach(), message)
        return self._out
