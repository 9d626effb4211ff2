"""The future of one promise where it was made, for backends: taken once, ended once, let go after both."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from dtorch_core.errors import ProtocolError
from dtorch_core.future import Outcome, TensorFuture


class Slot:
    """Keeps a future until it has been taken and has ended: its value then is the consumers' alone.

    Without a lock, since a promise may be dropped, and settle this, in the midst of any line (collectors and signal
    handlers run anywhere). The one step that has to be atomic is a ``list.pop``.
    """

    def __init__(self, label: str) -> None:
        """
        :param label: how messages call the promise: ``"promise 3 of pid 12"``.
        """
        self.label = label
        self._future: TensorFuture | None = TensorFuture(label)
        self._untaken = [True]
        self._cancelled = False

    def take(self) -> TensorFuture:
        """The future.

        :raises ProtocolError: if it was taken already.
        """
        future = self._future
        try:
            self._untaken.pop()
        except IndexError:
            raise ProtocolError(f"future() of {self.label}: it was taken already; a promise has one future") from None

        assert future is not None, "kept until it is taken"
        self._let_go(future)
        return future

    def settle(self, outcome: Outcome) -> None:
        """End the future; nothing happens if it has ended."""
        future = self._future
        if future is not None:
            future.settle(outcome)
            self._let_go(future)

    def cancelled(self) -> bool:
        """Whether the consumer has cancelled the future."""
        future = self._future
        return self._cancelled if future is None else future.cancelled()

    def when_over(self, call: Callable[[Future[Tensor | None]], object]) -> None:
        """Call ``call(future)`` in the thread that ends the future; at once, if it is there and has ended."""
        future = self._future
        if future is not None:
            future.add_done_callback(call)

    def _let_go(self, future: TensorFuture) -> None:
        # Both ends call this when they are done; the later of the two finds that both are.
        if not self._untaken and future.done():
            self._cancelled = future.cancelled()
            self._future = None
