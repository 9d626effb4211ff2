"""The promise contract: who may set a value, once, and what a dropped promise owes its future.

The rules are kept here, alike for every backend: one set, one hand-over, checks in the caller, and the broken
promise. A backend carries the outcome from :meth:`TensorPromise.deliver` to a :class:`TensorFuture`.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from dtorch_core import streams
from dtorch_core._context import BackendContext
from dtorch_core._promise_backends import Reach, choose, named
from dtorch_core._promise_token import Token, parse
from dtorch_core._selection.reasons import CAPABILITIES
from dtorch_core.checks import check_tensor, plain_tensor
from dtorch_core.errors import BrokenPromiseError, ProtocolError, UnsupportedOperationError
from dtorch_core.future import Outcome, TensorFuture

if TYPE_CHECKING:
    import torch

__all__ = ["GetTensorOp", "Outcome", "TensorFuture", "TensorPromise", "attach_promise", "make_promise"]

# What became of the right to set, as messages say it; None while it is here.
SET = "it has been set already"
HANDED_OVER = "the right to set it was handed over by serialize() or pickling, and is with whoever attaches the token"


class TensorPromise(ABC):
    """The right to set one value, once, and the way to its future. Every method is thread-safe.

    Dropped while it holds that right, it ends its future with :class:`BrokenPromiseError`. (What keeps a traceback
    keeps the promises in its frames, too: they are dropped with it.)
    """

    _right: str | None = "it was never made"  # until __init__ has run: __del__ may come before

    def __init__(self, ctx: BackendContext, label: str) -> None:
        """
        :param label: how messages call it, the same as its future: ``"promise 3 of pid 12"``.
        """
        self.label = label
        self.device = ctx.device
        self.selection = ctx.selection
        """Why this backend carries it."""
        self.capabilities: frozenset[str] = CAPABILITIES["promise"]
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._right = None

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.selection.chosen or ""

    def future(self) -> TensorFuture:
        """The consumer's side; once.

        :raises ProtocolError: if it was taken already.
        """
        future = self.take_future()
        future.selection, future.capabilities = self.selection, self.capabilities
        return future

    def set_result(self, tensor: Tensor | None, *, stream: torch.cuda.Stream | None = None) -> None:
        """Fulfil it, with None if there is nothing but the news. Quietly dropped if the future was cancelled.

        The tensor must not be written afterwards. On CUDA its value is what ``stream`` (the current one where None)
        will have written by then; this does not wait for it. ``requires_grad`` arrives detached.

        :raises ProtocolError: if it has been set, or handed over.
        :raises UnsupportedTensorError: if this kind of tensor can't be carried; it is then still unset.
        """
        if tensor is None:
            outcome = Outcome()
        else:
            where = f"set_result of {self.label}"
            tensor = plain_tensor(tensor)
            check_tensor(where, tensor)
            if tensor.device.type not in self.capabilities:
                raise UnsupportedOperationError(
                    f"{where}: the promise backend {self.backend!r} does not declare {tensor.device.type!r}"
                )

            if stream is not None:
                streams.keep_until_done(tensor, stream)

            outcome = Outcome(tensor.detach(), streams.record(tensor, stream))

        with self._use("set_result", SET):
            self.deliver(outcome)

    def set_exception(self, exc: BaseException) -> None:
        """End its future with an error, which ``result()`` raises.

        :raises TypeError: if it is not an exception's instance.
        :raises ProtocolError: if it has been set, or handed over.
        """
        if not isinstance(exc, BaseException):
            raise TypeError(f"set_exception of {self.label}: takes an instance of an exception, not {exc!r}")

        with self._use("set_exception", SET):
            self.deliver(Outcome(error=exc))

    def serialize(self) -> bytes:
        """Hand over the right to set, once, to whoever calls :func:`attach_promise` on the result.

        Dropping this object then changes nothing. Until the token is attached nobody holds the right, so nobody can
        break the promise: a token that is lost leaves its future pending.

        :raises ProtocolError: if it has been set, or handed over already.
        """
        with self._use("serialize", HANDED_OVER):
            return Token(self.backend, self.device, self.hand_over()).to_bytes()

    @abstractmethod
    def cancelled(self) -> bool:
        """Whether the consumer has cancelled the future, so that the work is not needed."""

    @abstractmethod
    def take_future(self) -> TensorFuture:
        """For backends: the future, to the first that asks, also once the promise is set or handed over.

        :raises ProtocolError: if it was taken already, or can't be taken here.
        """

    @abstractmethod
    def deliver(self, outcome: Outcome) -> None:
        """For backends: bring the outcome to the future, by its ``settle``. Quiet if that has been cancelled.

        Called once by the holder of the right. Where it raises, the promise is as good as unset.
        """

    @abstractmethod
    def hand_over(self) -> bytes:
        """For backends: make the token with which ``attach`` gives the right to set to one other holder."""

    @contextmanager
    def _use(self, call: str, spent: str) -> Iterator[None]:
        """Use up the right to set; it comes back where the body raises."""
        if os.getpid() != self._pid:
            raise ProtocolError(
                f"{call} of {self.label}: it is in pid {self._pid}, and this is pid {os.getpid()}, forked from it; "
                f"hand it over by serialize()"
            )

        with self._lock:
            if self._right is not None:
                raise ProtocolError(f"{call} of {self.label}: {self._right}")

            self._right = spent

        try:
            yield
        except Exception:
            self._right = None
            raise

    def __del__(self) -> None:
        # A fork's copy is not the holder; and while the interpreter ends there is nobody to tell.
        if self._right is not None or sys.is_finalizing() or os.getpid() != self._pid:
            return

        self.deliver(
            Outcome(
                error=BrokenPromiseError(
                    f"{self.label}: its holder in pid {self._pid} dropped it unset: it returned or failed without "
                    f"set_result() or set_exception()"
                )
            )
        )

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return attach_promise, (self.serialize(),)

    def __copy__(self) -> NoReturn:
        raise ProtocolError(f"copy of {self.label}: there is one right to set it; hand it over by serialize()")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}: {self._right or 'unset'}>"


class GetTensorOp:
    """An operator for a pipeline: passes its tensor on and fulfils a promise with it, when the stream gets there.

    It neither waits nor copies: what comes after it must not write the tensor in place.
    """

    def __init__(self, promise: TensorPromise) -> None:
        if not isinstance(promise, TensorPromise):
            raise TypeError(f"GetTensorOp takes a TensorPromise, not {type(promise).__name__}")

        self.promise = promise

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` itself, at once. Raises as :meth:`TensorPromise.set_result` does."""
        self.promise.set_result(tensor)
        return tensor


def make_promise(
    *, reach: Reach = "thread", device: str | torch.device | None = None, backend: str | None = None
) -> TensorPromise:
    """A promise on the backend that fits.

    :param reach: how far its writer may be: ``"thread"`` is this process, ``"process"`` this host.
    :param device: where its tensor will be; None is the CPU.
    :param backend: a backend's name; it never falls through to another one.
    :raises NoBackendError: if no backend fits, or the one named does not, with each reason.
    """
    chosen = choose(reach, device, backend)
    return chosen.adopt(chosen.promises.create())


def attach_promise(token: bytes) -> TensorPromise:
    """The right to set that :meth:`TensorPromise.serialize` handed over; whoever attaches it first has it.

    :raises ProtocolError: if it is no token, comes from where this backend does not reach, or was attached already.
    :raises PeerLostError: if the process that made the promise is gone.
    :raises StoreTimeoutError: if that process does not answer.
    :raises NoBackendError: if the backend that it names is not installed.
    """
    parsed = parse(token)
    chosen = named(parsed.backend, parsed.device)
    return chosen.adopt(chosen.promises.attach(parsed.inner))
