"""A TensorStore that copies: what the ranks share is one object, under one condition variable."""

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtorch_core import (
    AbortedError,
    BackendContext,
    KeyInUseError,
    PeerLostError,
    ProtocolError,
    StoreTimeoutError,
    TensorStore,
    UnsupportedOperationError,
)
from dtorch_core.checks import check_publish, plain_tensor

Missing = tuple[set[int], set[int], int]
"""Who has to act before a wait is over: all of the first ranks, and so many of the second."""


class Item:
    def __init__(self, owner: int, tensor: Tensor, get_count: int) -> None:
        self.owner, self.tensor, self.get_count = owner, tensor, get_count
        self.takers: set[int] = set()
        self.finished: set[int] = set()


class Gate(set[int]):
    """The ranks that stand before a barrier."""

    passed = False


class Shared:
    def __init__(self) -> None:
        self.changed = threading.Condition()  # reentrant: a handle may be collected, and close, at any moment
        self.items: dict[str, Item] = {}
        self.barrier, self.reset, self.resets = Gate(), Gate(), 0
        self.closed: set[int] = set()
        self.lost = ""


_shared: dict[str, Shared] = {}


class ExampleStore(TensorStore):
    def __init__(self, ctx: BackendContext) -> None:
        super().__init__(ctx)
        # The rendezvous is this opening's own: whoever comes first names the object that the ranks share.
        self._token = ctx.rendezvous.compare_set("token", "", uuid.uuid4().hex).decode()
        self._all = _shared.setdefault(self._token, Shared())
        self._others = set(range(ctx.world_size)) - {ctx.rank}

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
        tensor = plain_tensor(tensor)
        check_publish(key, tensor, get_count, self.world_size)
        if tensor.is_cuda or writable or torch.device(dest_device or "cpu").type != "cpu":
            raise UnsupportedOperationError(f"{self}: src_set({key!r}): example carries CPU tensors, read-only")

        with self._all.changed:
            self._check_open()
            if key in self._all.items:
                raise KeyInUseError(f"{self}: {key!r} is live, set by rank {self._all.items[key].owner}")

            self._all.items[key] = Item(self.rank, tensor.detach().clone(), get_count)
            self._all.changed.notify_all()

    def src_wait_until_get_finished(
        self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None
    ) -> None:
        with self._all.changed:
            self._check_open()
            item = self._all.items.get(key)
            if item is None or item.owner != self.rank:
                raise ProtocolError(f"{self}: rank {self.rank} waits for {key!r}, but has not set it")

            def missing() -> Missing:
                return item.takers - item.finished, self._others - item.takers, item.get_count - len(item.takers)

            self._wait(lambda: len(item.finished) == item.get_count, missing, f"the consumers of {key!r}", timeout)
            if self._all.items.get(key) is item:  # a reset may have dropped it
                del self._all.items[key]

    def dest_get(self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None) -> Tensor:
        def ready() -> bool:
            item = self._all.items.get(key)
            return item is not None and self.rank not in item.takers and len(item.takers) < item.get_count

        with self._all.changed:
            self._check_open()
            self._wait(ready, lambda: (set(), self._others, min(1, len(self._others))), f"{key!r}", timeout)
            self._all.items[key].takers.add(self.rank)
            return self._all.items[key].tensor.detach()

    def dest_finish_get(self, key: str, *, stream: torch.cuda.Stream | None = None) -> None:
        with self._all.changed:
            item = self._all.items.get(key)
            if item is None or self.rank not in item.takers - item.finished:
                raise ProtocolError(f"{self}: rank {self.rank} finishes {key!r}, but has not got it")

            item.finished.add(self.rank)
            if len(item.finished) == item.get_count:
                del item.tensor
                self._all.changed.notify_all()

    def barrier(self, *, timeout: float | None = None) -> None:
        with self._all.changed:
            if self._pass(self._all.barrier, "barrier()", timeout):
                self._all.barrier = Gate()

    def reset(self, *, timeout: float | None = None) -> None:
        with self._all.changed:
            if self._pass(self._all.reset, "reset()", timeout):
                self._all.items.clear()
                self._all.barrier, self._all.reset, self._all.resets = Gate(), Gate(), self._all.resets + 1

    def empty(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        with self._all.changed:
            self._check_open()

        return torch.empty(tuple(size), dtype=dtype, device=device or self.device)

    def close(self) -> None:
        with self._all.changed:
            self._all.closed.add(self.rank)
            self._all.changed.notify_all()
            if len(self._all.closed) == self.world_size:
                _shared.pop(self._token, None)

    __del__ = close

    def abort(self, reason: str, *, died: bool = False) -> None:
        with self._all.changed:
            self._all.lost = self._all.lost or f"rank {self.rank} (pid {os.getpid()}) gave up: {reason}"
            self._all.changed.notify_all()

    def _check_open(self) -> None:
        if self.rank in self._all.closed:
            raise AbortedError(f"{self}: it is closed")

    def _pass(self, gate: Gate, what: str, timeout: float | None) -> bool:
        """Wait until all stand before the gate; true for the one who came last and opens it."""
        self._check_open()
        gate.add(self.rank)
        if len(gate) == self.world_size:
            gate.passed = True
            self._all.changed.notify_all()
            return True

        try:
            self._wait(lambda: gate.passed, lambda: (self._others - gate, set(), 0), what, timeout)
        finally:
            gate.discard(self.rank)

        return False

    def _wait(
        self, ready: Callable[[], bool], missing: Callable[[], Missing], what: str, timeout: float | None
    ) -> None:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        shared, resets = self._all, self._all.resets
        while not ready():
            all_of, some_of, number = missing()
            gone = all_of & shared.closed
            if number > len(some_of - shared.closed):
                gone |= some_of & shared.closed

            names = ", ".join(f"rank {rank}" for rank in sorted(gone or all_of | some_of))
            if shared.resets > resets or self.rank in shared.closed:
                raise AbortedError(f"{self}: the wait for {what} ended: the store was reset or closed")

            if shared.lost or gone:
                reason = shared.lost or f"{names} (pid {os.getpid()}) closed the store"
                raise PeerLostError(f"{self}: the wait for {what} ended: {reason}")

            if time.monotonic() >= deadline:
                raise StoreTimeoutError(f"{self}: the wait for {what} ended: {names} had not come in time")

            shared.changed.wait(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
