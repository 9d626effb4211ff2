"""Messages: a tensor from one rank to one other, which takes it when it wants it.

This is what point-to-point calls need of a store. The default here is made of the four steps: the n-th message of a
source, destination and tag is published under a key of its own. It can't wait for several sources at once; a store
that can overrides :meth:`TensorStore.send` and :meth:`TensorStore.expect`.
"""

from __future__ import annotations

import bisect
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtorch_core import streams
from dtorch_core._copies import copy_into
from dtorch_core._text import seconds
from dtorch_core.errors import DtorchError, StoreTimeoutError, UnsupportedOperationError

if TYPE_CHECKING:
    from dtorch_core.store import TensorStore


class Receipt(ABC):
    """A message that is expected. Receipts of one source and tag get its messages in the order they were made."""

    @abstractmethod
    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> tuple[Tensor, int]:
        """The message, which the caller owns, and its source; on CUDA ordered on ``stream``. May be called again.

        :raises StoreTimeoutError: if it has not come in ``timeout`` seconds; it stays expected.
        :raises PeerLostError: if no rank is left that could send it.
        """

    @abstractmethod
    def done(self) -> bool:
        """The message is here, or can't come any more."""

    @abstractmethod
    def cancel(self) -> bool:
        """Expect it no more, so that the message goes to the next receipt; False if it is here already."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the message is here, or can't come any more.

        It may be called in any rank's thread, and must wait for nothing.
        """


class FourStepMail:
    """The default of :meth:`TensorStore.send` and :meth:`TensorStore.expect`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._expected: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._next: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._unseen: deque[str] = deque()

    def send(self, store: TensorStore, tensor: Tensor, dst: int, tag: int, stream: torch.cuda.Stream | None) -> None:
        """As :meth:`TensorStore.send`."""
        copy = store.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            copy_into(copy, tensor.detach())

        with self._lock:
            # Under the lock, since a number counts only once its message is out: a gap would hold up the receiver.
            key = f"mail/{store.rank}/{dst}/{tag}/{self._sent[dst, tag]}"
            store.src_set(key, copy, 1, stream=stream)
            self._sent[dst, tag] += 1
            self._unseen.append(key)
            self._free_some(store)

    def expect(self, store: TensorStore, src: int | None, tag: int) -> Receipt:
        """As :meth:`TensorStore.expect`."""
        if src is None:
            raise UnsupportedOperationError(
                f"{store.label} (backend {store.backend!r}) can't wait for any source at once; name one (src=)"
            )

        with self._lock:
            free = self._expected[src, tag]
            if free:
                number = free.pop(0)
            else:
                number = self._next[src, tag]
                self._next[src, tag] += 1

        return _KeyReceipt(self, store, src, tag, number)

    def give_back(self, src: int, tag: int, number: int) -> None:
        """A cancelled receipt's message goes to the next receipt."""
        with self._lock:
            bisect.insort(self._expected[src, tag], number)

    def _free_some(self, store: TensorStore) -> None:
        """Free the keys of messages that were taken; look only, don't wait. Two for each one sent keeps them few."""
        for _ in range(min(2, len(self._unseen))):
            key = self._unseen.popleft()
            try:
                store.src_wait_until_get_finished(key, timeout=0)
            except StoreTimeoutError:
                self._unseen.append(key)
            except DtorchError:
                continue  # its receiver is gone: that is no failure of the message sent now


class _KeyReceipt(Receipt):
    def __init__(self, mail: FourStepMail, store: TensorStore, src: int, tag: int, number: int) -> None:
        self._mail, self._store, self._src, self._tag, self._number = mail, store, src, tag, number
        self._receiving = threading.Lock()
        self._message: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> tuple[Tensor, int]:
        deadline = time.monotonic() + timeout
        # Another thread may be receiving it; it has a deadline of its own.
        if not self._receiving.acquire(timeout=max(0.0, timeout)):
            raise StoreTimeoutError(self._late(timeout))

        try:
            if self._message is None:
                self._receive(max(0.0, deadline - time.monotonic()), stream)
        finally:
            self._receiving.release()

        message = self._message
        assert message is not None, "it is here, or the wait has raised"
        streams.order_after(self._ready, message, stream)
        streams.keep_until_done(message, stream)
        return message, self._src

    def done(self) -> bool:
        try:
            self.wait(0)
        except StoreTimeoutError:
            return False
        except DtorchError:
            return True

        return True

    def cancel(self) -> bool:
        if self._message is not None:
            return False

        self._mail.give_back(self._src, self._tag, self._number)
        return True

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        def follow() -> None:
            try:
                self.wait(self._store.timeout)
            except Exception:
                pass  # the callback asks for the outcome itself, and finds this error there

            callback()

        name = f"{self._store.name} rank {self._store.rank} receives"
        threading.Thread(target=follow, name=name, daemon=True).start()

    def _receive(self, timeout: float, stream: torch.cuda.Stream | None) -> None:
        key = f"mail/{self._src}/{self._store.rank}/{self._tag}/{self._number}"
        try:
            with self._store.borrow(key, stream=stream, timeout=timeout) as borrowed:
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    message = borrowed.clone()
                    self._ready = streams.record(message, stream)
        except StoreTimeoutError as error:
            raise StoreTimeoutError(self._late(timeout)) from error

        self._message = message

    def _late(self, timeout: float) -> str:
        return (
            f"{self._store.label}, rank {self._store.rank}, recv from rank {self._src} (tag {self._tag}): "
            f"rank {self._src} had not sent it after {seconds(timeout)}"
        )
