"""What the parts of the promise kit share: a promise with its future, and calls that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from dtorch_core._meeting.member import normal_device
from dtorch_core.future import TensorFuture
from dtorch_core.promise import TensorPromise, make_promise
from dtorch_core.testing._harness import CUDA, Background, Conformance


class PromiseConformance(Conformance):
    """Base of the parts of :class:`PromiseTests`."""

    kind = "promise"

    @property
    def home(self) -> str:
        """The device for tests where any will do."""
        return "cpu" if "cpu" in self.declared else normal_device(CUDA)

    def promise(self, device: str | None = None) -> TensorPromise:
        """A promise of the backend."""
        return make_promise(device=device or self.home, backend=self.backend)

    def pair(self, device: str | None = None) -> tuple[TensorPromise, TensorFuture]:
        """A promise and its future."""
        promise = self.promise(device)
        return promise, promise.future()

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """Start the calls at one moment, each in a thread; what each returned or raised, in order."""
        gate = threading.Barrier(len(calls))

        def run(call: Callable[[], Any]) -> Any:  # noqa: ANN401
            gate.wait(self.patience)
            try:
                return call()
            except Exception as error:
                return error

        running = [Background(partial(run, call), f"call {index}") for index, call in enumerate(calls)]
        return [background.result(self.patience) for background in running]
