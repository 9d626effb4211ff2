"""Joint work: every rank offers tensors under one key, and when all have come the work is done on all of them.

This is what a collective needs of a store. :meth:`TensorStore.post` has a default here, made of the four steps: rank 0
borrows what the others publish writable, works in place, and finishes. A store whose ranks share memory can do
better: the last rank to arrive works at once, and only the ranks that sleep are woken.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dtorch_core import errors
from dtorch_core._text import rank_list, seconds
from dtorch_core.errors import AbortedError, DtorchError, StoreTimeoutError

if TYPE_CHECKING:
    from dtorch_core.store import TensorStore


class Offer(NamedTuple):
    """What one rank brings to a piece of joint work."""

    rank: int
    note: str
    """What the rank believes this work is; the work compares the notes."""
    tensors: tuple[Tensor, ...]
    """Read and written in place until the work is done."""


Task = Callable[[], None]
"""A part of the work that may run in any order, on any rank's thread, beside the other parts."""

Work = Callable[[Sequence[Offer]], Sequence[Task]]
"""Called once with every offer, in rank order, when all have come. Does the work, or returns its parts."""


class Ticket(ABC):
    """One rank's share in a piece of joint work that has been posted."""

    @abstractmethod
    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        """Wait until the work is done; on CUDA order ``stream`` after it. May be called again.

        :raises StoreTimeoutError: if ranks have not come in ``timeout`` seconds. The work is then dead, and so is all
            that is posted later, on every rank.
        :raises DtorchError: what the work raised, on every rank.
        """

    @abstractmethod
    def notes(self) -> Sequence[str]:
        """Every rank's note, in rank order; once the work is done."""

    @abstractmethod
    def done(self) -> bool:
        """The work is done, or failed."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the work is done or failed; at once if it is."""


def copy_of(error: BaseException) -> BaseException:
    """An error to raise in one more thread: exceptions carry the traceback of whoever raised them last."""
    try:
        twin = type(error)(*error.args)
    except Exception:
        return error

    twin.__cause__ = error
    return twin


class FourSteps:
    """The default of :meth:`TensorStore.post`, on a thread of its own, since the four steps block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._working = False
        self._dead: str | None = None

    def post(
        self,
        store: TensorStore,
        key: str,
        note: str,
        tensors: Sequence[Tensor],
        work: Work,
        stream: torch.cuda.Stream | None,
    ) -> Ticket:
        """As :meth:`TensorStore.post`."""
        if self._dead is not None:
            raise AbortedError(f"store {store.name!r}, rank {store.rank}, {key}: {self._dead}")

        if stream is None and tensors and tensors[0].is_cuda:
            stream = torch.cuda.current_stream(tensors[0].device)  # this thread's, not the helper's

        offer = Offer(store.rank, note, tuple(tensors))
        role = _collect if store.rank == 0 else _contribute
        future: Future[Sequence[str]] = Future()

        def run() -> None:
            try:
                notes = role(store, f"joint/{key}", offer, work, stream)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(notes)

        with self._lock:
            self._queue.append(run)
            idle, self._working = not self._working, True

        if idle:
            threading.Thread(target=self._drain, name=f"{store.name} rank {store.rank} posts", daemon=True).start()

        return _ThreadTicket(self, store, key, future)

    def _drain(self) -> None:
        """Run what is queued, in order, then end: no thread outlives its work."""
        while True:
            with self._lock:
                if not self._queue:
                    self._working = False
                    return

                run = self._queue.popleft()

            run()

    def retire(self, store: TensorStore, reason: str) -> None:
        """A rank gave up: nothing can be posted any more, here or by its peers."""
        self._dead = reason
        store.abort(reason)


class _ThreadTicket(Ticket):
    def __init__(self, steps: FourSteps, store: TensorStore, key: str, future: Future[Sequence[str]]) -> None:
        self._steps, self._store, self._key, self._future = steps, store, key, future

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        try:
            error = self._future.exception(timeout)
        except TimeoutError:
            rank = self._store.rank
            self._steps.retire(self._store, f"rank {rank} gave up on {self._key} after {seconds(timeout)}")
            raise StoreTimeoutError(
                f"store {self._store.name!r}, rank {rank}, {self._key}: not every other rank "
                f"({rank_list(set(range(self._store.world_size)) - {rank})}) had come after {seconds(timeout)}"
            ) from None

        if error is not None:
            raise copy_of(error)

    def notes(self) -> Sequence[str]:
        return self._future.result(timeout=0)

    def done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())


def _contribute(
    store: TensorStore, key: str, offer: Offer, work: Work, stream: torch.cuda.Stream | None
) -> Sequence[str]:
    _say(store, f"{key}/note/{offer.rank}", {"note": offer.note, "tensors": len(offer.tensors)}, 1)
    for number, tensor in enumerate(offer.tensors):
        store.src_set(f"{key}/{offer.rank}/{number}", tensor, 1, stream=stream, writable=True)

    end = _hear(store, f"{key}/end")
    for number in range(len(offer.tensors)):
        store.src_wait_until_get_finished(f"{key}/{offer.rank}/{number}", stream=stream)

    store.src_wait_until_get_finished(f"{key}/note/{offer.rank}")
    if end["error"]:
        raise _rebuilt(end["error"], end["text"])

    return list(end["notes"])


def _collect(
    store: TensorStore, key: str, offer: Offer, work: Work, stream: torch.cuda.Stream | None
) -> Sequence[str]:
    offers, error = [offer], None
    for rank in range(1, store.world_size):
        said = _hear(store, f"{key}/note/{rank}")
        keys = [f"{key}/{rank}/{number}" for number in range(said["tensors"])]
        offers.append(Offer(rank, said["note"], tuple(store.dest_get(k, stream=stream) for k in keys)))

    try:
        with torch.cuda.stream(stream):  # None changes nothing
            for task in work(offers):
                task()
    except Exception as failure:
        error = failure

    notes = [other.note for other in offers]
    for other in offers[1:]:
        for number in range(len(other.tensors)):
            store.dest_finish_get(f"{key}/{other.rank}/{number}", stream=stream)

    if store.world_size > 1:
        told = {"error": type(error).__name__ if error else "", "text": str(error or ""), "notes": notes}
        _say(store, f"{key}/end", told, store.world_size - 1)
        store.src_wait_until_get_finished(f"{key}/end")

    if error is not None:
        raise error

    return notes


def _say(store: TensorStore, key: str, words: dict[str, Any], get_count: int) -> None:
    data = bytearray(json.dumps(words).encode())
    store.src_set(key, torch.frombuffer(data, dtype=torch.uint8), get_count)


def _hear(store: TensorStore, key: str) -> dict[str, Any]:
    with store.borrow(key) as words:
        heard: dict[str, Any] = json.loads(bytes(words.tolist()))

    return heard


def _rebuilt(name: str, text: str) -> Exception:
    """The error of the rank that worked, as far as its type is one of ours."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, DtorchError):
        return kind(text)

    return DtorchError(f"{name}: {text}")
