"""Messages: a tensor from one rank to one other, which takes it when it wants it.

This is what point-to-point calls need of a store. The default here is made of the four steps: the n-th message of a
source, destination and tag is published under a key of its own. It can't wait for several sources at once; a store
that can overrides :meth:`TensorStore.send` and :meth:`TensorStore.expect`.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtorch_core.errors import StoreTimeoutError, UnsupportedOperationError

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
        """Call ``callback`` once the message is here, or can't come any more."""


class FourStepMail:
    """The default of :meth:`TensorStore.send` and :meth:`TensorStore.expect`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
        self._expected: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._next: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._unseen: deque[str] = deque()

    def send(self, store: TensorStore, tensor: Tensor, dst: int, tag: int, stream: torch.cuda.Stream | None) -> None:
        """As :meth:`TensorStore.send`."""
        copy = store.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.cuda.stream(stream):
            copy.copy_(tensor.detach())

        with self._lock:
            key = f"mail/{store.rank}/{dst}/{tag}/{next(self._sent[dst, tag])}"
            store.src_set(key, copy, 1, stream=stream)
            self._unseen.append(key)
            self._free(store)

    def expect(self, store: TensorStore, src: int | None, tag: int) -> Receipt:
        """As :meth:`TensorStore.expect`."""
        if src is None:
            raise UnsupportedOperationError(
                f"store {store.name!r} (backend {store.backend!r}) can't wait for any source at once; name one (src=)"
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
            self._expected[src, tag].append(number)
            self._expected[src, tag].sort()

    def _free(self, store: TensorStore) -> None:
        """Free the keys of messages that were taken; look only, don't wait."""
        for _ in range(len(self._unseen)):
            key = self._unseen.popleft()
            try:
                store.src_wait_until_get_finished(key, timeout=0)
            except StoreTimeoutError:
                self._unseen.append(key)


class _KeyReceipt(Receipt):
    def __init__(self, mail: FourStepMail, store: TensorStore, src: int, tag: int, number: int) -> None:
        self._mail, self._store, self._src, self._tag, self._number = mail, store, src, tag, number
        self._lock = threading.Lock()
        self._message: Tensor | None = None

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> tuple[Tensor, int]:
        with self._lock:
            if self._message is None:
                key = f"mail/{self._src}/{self._store.rank}/{self._tag}/{self._number}"
                with self._store.borrow(key, stream=stream, timeout=timeout) as message, torch.cuda.stream(stream):
                    self._message = message.clone()

        return self._message, self._src

    def done(self) -> bool:
        try:
            self.wait(0)
        except StoreTimeoutError:
            return False

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
