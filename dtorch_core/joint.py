"""Joint work: every rank offers tensors under one key, and when all have come the work is done on all of them.

This is what a collective needs of a store. :meth:`TensorStore.post` has a default here, made of the four steps: rank 0
borrows what the others publish writable, works in place, and finishes. A store whose ranks share memory can do
better: the last rank to arrive works at once, and only the ranks that sleep are woken.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dtorch_core import errors, streams
from dtorch_core._futures import settle_after
from dtorch_core._text import rank_list, seconds
from dtorch_core.checks import check_written
from dtorch_core.errors import (
    AbortedError,
    DtorchError,
    PeerLostError,
    StoreTimeoutError,
    UnsupportedTensorError,
)

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
        """Call ``callback`` once the work is done or failed; at once if it is.

        It may be called in any rank's thread, and must wait for nothing.
        """

    def with_earlier(self) -> Ticket:
        """This one, done no sooner than what its rank has posted so far and all ranks have come to.

        Asked for at once, by the thread that has posted. How the earlier work ended its own tickets tell. The default
        is for stores in which work is done when all have come.
        """
        return self


class Onward(Ticket):
    """Another ticket in all that is not written anew: for those whose wait does more."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        self._ticket.wait(timeout, stream)

    def notes(self) -> Sequence[str]:
        return self._ticket.notes()

    def done(self) -> bool:
        return self._ticket.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._ticket.add_done_callback(callback)


class WithEarlier(Onward):
    """A ticket, and what its rank began before. All ranks have come to that, too, once they have come to this."""

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        deadline = time.monotonic() + timeout
        self._ticket.wait(timeout, stream)
        self._await_earlier(max(deadline - time.monotonic(), 0), stream)

    def done(self) -> bool:
        return self._ticket.done() and self._is_over()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        settle_after(partial(self.wait, threading.TIMEOUT_MAX), lambda _, error: callback(), "a callback's wait")

    @abstractmethod
    def _await_earlier(self, timeout: float, stream: torch.cuda.Stream | None) -> None:
        """Wait for what was begun before, and order ``stream`` after it. How it ended its own tickets tell.

        :raises StoreTimeoutError: if it has not ended in ``timeout`` seconds.
        """

    @abstractmethod
    def _is_over(self) -> bool:
        """That is done, or the ticket itself, which is done, ended badly: its wait then says so at once."""


def copy_of(error: BaseException) -> BaseException:
    """An error to raise in one more thread: exceptions carry the traceback of whoever raised them last."""
    try:
        twin = type(error)(*error.args)
    except Exception:
        return error

    twin.__cause__ = error
    return twin


class FourSteps:
    """The default of :meth:`TensorStore.post`: each post has a thread, since the four steps block.

    Rank 0 hears every rank's note, borrows every rank's tensors, works, and tells the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[Future[Done], None] = {}
        """In the order in which they were posted."""
        self._retired: str | None = None

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
        if stream is None and tensors and tensors[0].is_cuda:
            stream = torch.cuda.current_stream(tensors[0].device)  # this thread's, not the helper's

        reason = self._who_gave_up(store) if store.rank == 0 else self._retired
        if reason is not None:
            if store.rank == 0 and store.world_size > 1:
                _say(store, f"joint/{key}/end", _end(reason, retired=True), store.world_size - 1)  # they wait for it

            raise AbortedError(f"{store.label}, rank {store.rank}, {key}: {reason}")

        offer = Offer(store.rank, note, tuple(tensors))
        heard = [offer]
        future: Future[Done] = Future()
        with self._lock:
            earlier = list(self._pending)
            self._pending[future] = None

        def run() -> None:
            try:
                if store.rank == 0:
                    notes = self._collect(store, f"joint/{key}", heard, work, stream)
                else:
                    notes = self._contribute(store, f"joint/{key}", offer, stream)

                self._settle(future, Done(notes, streams.record(tensors[0], stream) if tensors else None))
            except BaseException as error:
                self._settle(future, error)

        threading.Thread(target=run, name=f"{store.name} rank {store.rank} {key}", daemon=True).start()
        return _ThreadTicket(self, store, key, heard, future, earlier)

    def retire(self, store: TensorStore, reason: str) -> None:
        """This rank gave up: it posts nothing any more, and rank 0 finishes nothing."""
        with self._lock:
            first, self._retired = self._retired is None, self._retired or reason
            pending = list(self._pending)

        if first and store.world_size > 1:
            _say(store, f"joint/retired/{store.rank}", {"reason": reason}, store.world_size - 1)

        for future in pending:
            self._settle(future, AbortedError(f"{store.label}, rank {store.rank}: {reason}"))

    def _settle(self, future: Future[Done], outcome: Done | BaseException) -> None:
        with self._lock:
            if future not in self._pending:
                return

            del self._pending[future]

        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _who_gave_up(self, store: TensorStore) -> str | None:
        """Why nothing can be posted any more; looks whether another rank has said so."""
        for rank in range(store.world_size) if self._retired is None else ():
            if rank == store.rank:
                continue

            try:
                self._retired = str(_hear(store, f"joint/retired/{rank}", timeout=0)["reason"])
                break
            except DtorchError:
                continue  # it has not said so, and may have left

        return self._retired

    def _contribute(
        self, store: TensorStore, key: str, offer: Offer, stream: torch.cuda.Stream | None
    ) -> Sequence[str]:
        _say(store, f"{key}/note/{offer.rank}", {"note": offer.note, "tensors": len(offer.tensors)}, 1)
        for number, tensor in enumerate(offer.tensors):
            name = f"{key}/{offer.rank}/{number}"
            store.src_set(name, tensor, 1, stream=stream, writable=_may_be_written(tensor))

        try:
            end = _hear(store, f"{key}/end")
        except PeerLostError:
            reason = self._who_gave_up(store)
            if reason is None:
                raise

            end = _end(reason, retired=True)

        if end["retired"]:
            # What is published stays so, perhaps unread: the store is of no more use to its group.
            self._retired = self._retired or end["text"]
            raise AbortedError(f"{store.label}, rank {store.rank}, {key}: {end['text']}")

        for number in range(len(offer.tensors)):
            store.src_wait_until_get_finished(f"{key}/{offer.rank}/{number}", stream=stream)

        store.src_wait_until_get_finished(f"{key}/note/{offer.rank}")
        if end["error"]:
            raise _rebuilt(end["error"], end["text"])

        return list(end["notes"])

    def _collect(
        self, store: TensorStore, key: str, offers: list[Offer], work: Work, stream: torch.cuda.Stream | None
    ) -> Sequence[str]:
        for rank in range(1, store.world_size):
            said = _hear(store, f"{key}/note/{rank}")
            keys = [f"{key}/{rank}/{number}" for number in range(said["tensors"])]
            offers.append(Offer(rank, said["note"], tuple(store.dest_get(k, stream=stream) for k in keys)))

        notes = [offer.note for offer in offers]
        reason, error = self._who_gave_up(store), None
        if reason is None:
            error = _worked(work, offers, stream)

        for offer in offers[1:]:
            for number in range(len(offer.tensors)):
                store.dest_finish_get(f"{key}/{offer.rank}/{number}", stream=stream)

        if store.world_size > 1:
            end = _end(reason, retired=True) if reason is not None else _end(error, notes)
            _say(store, f"{key}/end", end, store.world_size - 1)
            store.src_wait_until_get_finished(f"{key}/end")

        if reason is not None:
            raise AbortedError(f"{store.label}, rank 0, {key}: {reason}")

        if error is not None:
            raise error

        return notes


class Done(NamedTuple):
    """How one rank's share ended well."""

    notes: Sequence[str]
    event: torch.cuda.Event | None

    def order(self, stream: torch.cuda.Stream | None) -> None:
        """Put the stream behind it; the current one where it is None."""
        if self.event is not None:
            (stream if stream is not None else torch.cuda.current_stream(self.event.device)).wait_event(self.event)


class _ThreadTicket(Ticket):
    def __init__(
        self,
        steps: FourSteps,
        store: TensorStore,
        key: str,
        heard: Sequence[Offer],
        future: Future[Done],
        earlier: Sequence[Future[Done]],
    ) -> None:
        self._steps, self._store, self._key, self._heard, self._future = steps, store, key, heard, future
        self._earlier = earlier

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        try:
            error = self._outcome(timeout)
        except TimeoutError:
            missing = self._missing()
            reason = f"rank {self._store.rank} gave up on {self._key}: {missing} after {seconds(timeout)}"
            self._steps.retire(self._store, reason)
            raise self.late(missing, timeout) from None

        if error is not None:
            raise copy_of(error)

        self._future.result().order(stream)

    def notes(self) -> Sequence[str]:
        return self._future.result(timeout=0).notes

    def done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())

    def failed(self) -> bool:
        """It ended badly; of one that is done."""
        return self._future.exception() is not None

    def with_earlier(self) -> Ticket:
        return _ThreadsBefore(self, self._earlier) if self._earlier else self

    def late(self, what: str, timeout: float) -> StoreTimeoutError:
        """The error of a wait in this ticket's name."""
        label, rank = self._store.label, self._store.rank
        return StoreTimeoutError(f"{label}, rank {rank}, {self._key}: {what} after {seconds(timeout)}")

    def _outcome(self, timeout: float) -> BaseException | None:
        try:
            return self._future.exception(timeout)
        except TimeoutError:
            if len(self._heard) < self._store.world_size:
                raise

            return self._future.exception(self._store.timeout)  # all have come: the work ends by itself

    def _missing(self) -> str:
        others = range(1, self._store.world_size)
        if self._store.rank != 0:
            rest = [rank for rank in others if rank != self._store.rank]
            return "rank 0" + (f", or one of {rank_list(rest)}," if rest else "") + " had not come"

        # Rank 0 listens to one after the other.
        first, *later = others[len(self._heard) - 1 :] or others
        return f"rank {first} had not come" + (f" ({rank_list(later)} not heard yet)" if later else "")


class _ThreadsBefore(WithEarlier):
    """The threads of what was begun before end it."""

    def __init__(self, ticket: _ThreadTicket, earlier: Sequence[Future[Done]]) -> None:
        super().__init__(ticket)
        self._own, self._earlier = ticket, earlier

    def _await_earlier(self, timeout: float, stream: torch.cuda.Stream | None) -> None:
        if wait(self._earlier, timeout).not_done:
            raise self._own.late("what this rank had begun before was not done", timeout)

        for future in self._earlier:
            if future.exception() is None:
                future.result().order(stream)

    def _is_over(self) -> bool:
        return self._own.failed() or all(future.done() for future in self._earlier)


def _worked(work: Work, offers: Sequence[Offer], stream: torch.cuda.Stream | None) -> Exception | None:
    """Do the work; what it raised."""
    try:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for task in work(offers):
                task()
    except Exception as error:
        return error

    return None


def _end(outcome: Exception | str | None, notes: Sequence[str] = (), *, retired: bool = False) -> dict[str, Any]:
    """What rank 0 tells the others: how the work ended, or who gave up."""
    error = type(outcome).__name__ if isinstance(outcome, Exception) else ""
    return {"error": error, "text": str(outcome or ""), "notes": list(notes), "retired": retired}


def _say(store: TensorStore, key: str, words: dict[str, Any], get_count: int) -> None:
    data = bytearray(json.dumps(words).encode())
    store.src_set(key, torch.frombuffer(data, dtype=torch.uint8), get_count)


def _hear(store: TensorStore, key: str, timeout: float | None = None) -> dict[str, Any]:
    with store.borrow(key, timeout=timeout) as words:
        heard: dict[str, Any] = json.loads(bytes(words.tolist()))

    return heard


def _rebuilt(name: str, text: str) -> Exception:
    """The error of the rank that worked, as far as its type is one of ours."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, DtorchError):
        return kind(text)

    return DtorchError(f"{name}: {text}")


def _may_be_written(tensor: Tensor) -> bool:
    """No two of its elements share memory. Results are checked to be so; what is not is an input, and only read."""
    try:
        check_written("post", tensor)
    except UnsupportedTensorError:
        return False

    return True
