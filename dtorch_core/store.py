"""The TensorStore contract, and what is built on it once for every backend.

The four steps, ``reset``, ``barrier``, ``empty`` and ``close`` belong to the backend. Everything else here is made of
them; a backend may override :meth:`TensorStore.abort`, :meth:`TensorStore.post`, :meth:`TensorStore.send` and
:meth:`TensorStore.expect` to do better than the defaults.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from dtorch_core import streams
from dtorch_core._context import BackendContext
from dtorch_core._meeting.opening import open_backend
from dtorch_core._text import not_copied
from dtorch_core.checks import check_device
from dtorch_core.checks import check_publish as check_publish
from dtorch_core.errors import PluginError
from dtorch_core.joint import Ticket, Work
from dtorch_core.joint_steps import FourSteps
from dtorch_core.mail import FourStepMail, Receipt

if TYPE_CHECKING:
    from torch.distributed import Store


# What the defaults keep for a store, beside it: a backend's class owes them nothing, not even a call of __init__.
D = TypeVar("D")
_defaults_lock = threading.Lock()
_posts: weakref.WeakKeyDictionary[TensorStore, FourSteps] = weakref.WeakKeyDictionary()
_mail: weakref.WeakKeyDictionary[TensorStore, FourStepMail] = weakref.WeakKeyDictionary()


class TensorStore(ABC):
    """One rank's handle on a store: publish a tensor under a key, N consumers read it.

    Every method is thread-safe. Keys are strings. ``timeout`` is in seconds; None means the store's own, and zero is
    a look without waiting. Every wait raises :class:`StoreTimeoutError` at its deadline and can then be repeated,
    :class:`PeerLostError` if what it waits for can't come any more, and :class:`AbortedError` if the store is reset
    or closed meanwhile.
    """

    def __init__(self, ctx: BackendContext) -> None:
        self.name = ctx.name
        self.rank = ctx.rank
        self.world_size = ctx.world_size
        self.device = ctx.device
        self.topology = ctx.topology
        self.selection = ctx.selection
        self.backend = ctx.selection.chosen or ""
        self.timeout = ctx.timeout
        self._shown = ctx.label

    @property
    def label(self) -> str:
        """How messages call it: ``store 'x'``, or ``group 'x'`` where it is the store under a group."""
        return getattr(self, "_shown", "") or f"store {self.name!r}"

    @abstractmethod
    def src_set(
        self,
        key: str,
        tensor: Tensor,
        get_count: int,
        *,
        stream: torch.cuda.Stream | None = None,
        dest_device: torch.device | str | None = None,
        writable: bool = False,
    ) -> None:
        """Publish ``tensor`` under ``key`` for ``get_count`` consumers. Returns at once.

        The tensor must stay unchanged until :meth:`src_wait_until_get_finished` returns. On CUDA its value is what
        ``stream`` (the current one where None) will have written by then. One of a subclass is carried as the plain
        tensor that it is.

        :param dest_device: a hint: consumers want it there, so it is moved once, on this side.
        :param writable: consumers may write into it until they finish; no two of its elements may share memory.
        :raises TypeError: if the key is not a string.
        :raises ValueError: if there is no such ``dest_device`` here.
        :raises KeyInUseError: if the key is live: set, and not yet waited for.
        :raises ProtocolError: if ``get_count`` is below 1, or above the number of ranks: each gets it at most once.
        :raises UnsupportedTensorError: if this kind of tensor can't be carried.
        """

    @abstractmethod
    def src_wait_until_get_finished(
        self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None
    ) -> None:
        """Wait until every consumer has finished; then the key is free again and the tensor may be rewritten.

        On CUDA ``stream`` is made to wait for the consumers' work; the host is not.

        :raises ProtocolError: if this rank has not set the key.
        """

    @abstractmethod
    def dest_get(
        self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None
    ) -> Tensor:
        """Borrow the tensor published under ``key``, waiting for it; each rank gets each publication once.

        It is valid until :meth:`dest_finish_get`, and read-only unless it was published writable.
        """

    @abstractmethod
    def dest_finish_get(self, key: str, *, stream: torch.cuda.Stream | None = None) -> None:
        """End the borrow. Work already queued on ``stream`` still reads the right values.

        :raises ProtocolError: if this rank has not got the key, or has finished already.
        """

    @abstractmethod
    def reset(self, *, timeout: float | None = None) -> None:
        """Drop every key, on all ranks together. Pending waits raise :class:`AbortedError`."""

    @abstractmethod
    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def empty(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Uninitialised memory that :meth:`src_set` publishes without a copy; on the store's device where None."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Local, and may be repeated. Peers' waits that only this rank could satisfy raise PeerLostError."""

    def dest_get_to_device(
        self,
        key: str,
        device: torch.device | str,
        *,
        stream: torch.cuda.Stream | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """A copy on ``device`` that the caller owns. The borrow is over when this returns or raises.

        On CUDA the copy is ordered on ``stream`` (the current one of the tensor's device where None). A copy to the
        CPU is complete on return; it waits for the published value and itself, not for the caller's other work.

        :raises ValueError: if there is no such device here; nothing is borrowed then.
        """
        target = check_device(f"dest_get_to_device({key!r})", device)
        side = stream
        if side is None and torch.cuda.is_initialized():
            # Not on the current stream of the tensor's GPU, which may be another rank's and wait for this one. To the
            # CPU not on this rank's either: it may have much queued that this copy does not depend on.
            mine = _cuda_device(self.device)
            side = torch.cuda.Stream(mine) if target.type == "cpu" else torch.cuda.current_stream(mine)

        tensor = self.dest_get(key, stream=side, timeout=timeout)
        try:
            copy, done = streams.copy_to_device(tensor, target, side)
        finally:
            self.dest_finish_get(key, stream=side)

        if target.type == "cpu":
            streams.host_wait(done)
        elif done is not None and stream is None:
            streams.order_after(done, copy)

        return copy

    @contextmanager
    def publish(self, key: str, tensor: Tensor, get_count: int, **kw: Any) -> Iterator[None]:  # noqa: ANN401
        """``src_set`` on entry, ``src_wait_until_get_finished`` on exit; no wait if the body raised.

        :param kw: what :meth:`src_set` takes; ``stream`` and ``timeout`` are for the wait too.
        """
        timeout = kw.pop("timeout", None)
        self.src_set(key, tensor, get_count, **kw)
        yield
        self.src_wait_until_get_finished(key, stream=kw.get("stream"), timeout=timeout)

    @contextmanager
    def borrow(self, key: str, **kw: Any) -> Iterator[Tensor]:  # noqa: ANN401
        """``dest_get`` on entry, ``dest_finish_get`` on exit, also if the body raised."""
        tensor = self.dest_get(key, **kw)
        try:
            yield tensor
        finally:
            self.dest_finish_get(key, stream=kw.get("stream"))

    def post(
        self,
        key: str,
        note: str,
        tensors: Sequence[Tensor],
        work: Work,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> Ticket:
        """Offer tensors to a piece of work that needs those of all ranks; see :mod:`dtorch_core.joint`.

        Returns at once. When every rank has posted under ``key``, the work runs once, in place, on one of the ranks.
        The default is made of the four steps; a backend that shares memory between its ranks can do better.
        """
        return _default(_posts, self, FourSteps).post(self, key, note, tensors, work, stream)

    def send(self, tensor: Tensor, dst: int, tag: int, *, stream: torch.cuda.Stream | None = None) -> None:
        """Leave a copy of ``tensor`` for rank ``dst``, which may be this one; see :mod:`dtorch_core.mail`.

        Does not wait for it: ``tensor`` may be rewritten at once.
        """
        _default(_mail, self, FourStepMail).send(self, tensor, dst, tag, stream)

    def expect(self, src: int | None, tag: int) -> Receipt:
        """A receipt for the next message of ``src`` (any rank where None) with ``tag``. Never waits.

        :raises UnsupportedOperationError: if the backend can't wait for any source.
        """
        return _default(_mail, self, FourStepMail).expect(self, src, tag)

    def abort(self, reason: str, *, died: bool = False) -> None:
        """Wake every wait on every rank, now and later, with AbortedError; with PeerLostError if this rank died.

        The default can only leave.
        """
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            # No goodbye: whoever raises out of the block leaves its peers in the middle.
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}", died=True)

        self.close()

    def __reduce__(self) -> NoReturn:
        raise not_copied(self, "with open_store")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.world_size} on {self.device}>"


def open_store(
    name: str,
    *,
    rank: int,
    world_size: int,
    device: str | torch.device | None = None,
    rendezvous: Store | str | None = None,
    backend: str | None = None,
    timeout: float = 300.0,
) -> TensorStore:
    """Open a TensorStore with the other ranks, on the backend that fits where they are. Collective.

    :param device: this rank's device; None is the CPU.
    :param rendezvous: a c10d Store, ``tcp://``, ``file://`` or ``env://``; where None, torchrun's environment if its
        WORLD_SIZE is ``world_size``, else this process, by name.
    :param backend: a backend's name; it never falls through to another one.
    :param timeout: seconds, for this opening and for every later wait that names none.
    :raises NoBackendError: if no backend fits, or the one named does not, with each reason; on every rank.
    :raises StoreTimeoutError: if a rank has not come in time; it is named.
    """
    store: TensorStore = open_backend(
        "store",
        name,
        _checked_store,
        rank=rank,
        world_size=world_size,
        device=device,
        rendezvous=rendezvous,
        backend=backend,
        timeout=timeout,
    )
    return store


def _checked_store(store: Any, ctx: BackendContext) -> TensorStore:  # noqa: ANN401 - from a plugin
    if not isinstance(store, TensorStore):
        raise PluginError(
            f"store backend {ctx.selection.chosen!r}: its factory returned {type(store).__name__}, not a TensorStore"
        )

    return store


def _default(kept: weakref.WeakKeyDictionary[TensorStore, D], store: TensorStore, make: Callable[[], D]) -> D:
    with _defaults_lock:
        return kept.setdefault(store, make())


def _cuda_device(device: str) -> int | None:
    return torch.device(device).index if device.startswith("cuda") else None
