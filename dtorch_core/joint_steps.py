"""Joint work made of the four steps: the default of :meth:`TensorStore.post`.

Rank 0 works for all, on what the others publish writable. These words are said on the way:

==========  =========  ================================================================
``note``    to rank 0  a rank has come; its tensors are published
``go``      to all     all have come; or the work is dead, and who gave up
``in``      to rank 0  the rank is still in; or it has given up meanwhile, and why
``end``     to all     how the work ended
==========  =========  ================================================================

A rank may give up until it says ``in``, and rank 0 until it has heard that of all. From then on nobody does: the work
writes to every rank's tensors, and ends by itself. So it does not matter when the news of who gave up is read.

A share of ``go`` is finished after ``in`` was said. So rank 0's wait for its consumers ends also with a rank that
leaves without an answer, while a wait for a word could be satisfied by any other rank.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtorch_core import errors, streams
from dtorch_core._text import rank_list, seconds
from dtorch_core.checks import check_written
from dtorch_core.errors import (
    AbortedError,
    DtorchError,
    PeerLostError,
    StoreTimeoutError,
    UnsupportedTensorError,
)
from dtorch_core.joint import Offer, Ticket, WithEarlier, Work, copy_of, let_go

if TYPE_CHECKING:
    from torch import Tensor

    from dtorch_core.store import TensorStore

_at_work: dict[str, threading.Event] = {}
"""By its token, work for which rank 0, in this process, has called; set when it writes to no tensor any more."""


class Retired(NamedTuple):
    """A rank gave up."""

    reason: str
    keys: Sequence[str] = ()
    """What it had come to. What others call later it does not come to."""


class Done(NamedTuple):
    """How one rank's share ended well."""

    notes: Sequence[str]
    event: torch.cuda.Event | None

    def order(self, stream: torch.cuda.Stream | None) -> None:
        """Put the stream behind it; the current one where it is None."""
        if self.event is not None:
            (stream if stream is not None else torch.cuda.current_stream(self.event.device)).wait_event(self.event)


class Share:
    """One rank's share in a piece of joint work. What may change, but ``came``, is under the lock of its steps."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.future: Future[Done] = Future()
        self.came = 1
        """At rank 0: how many ranks it knows to have come."""
        self.given_up = False
        self.bound = False
        """The rank is in: it gives up no more."""
        self.token = ""
        """Of the work that it is in."""
        self.over = False
        """How the work ended is known."""
        self.called = False
        """Rank 0 has said ``go``, and owes an ``end`` ..."""
        self.ended = False
        """... which it has said, too."""


class FourSteps:
    """Of one rank's handle. Each post has a thread, since the four steps block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[Share, None] = {}
        """In the order in which they were posted."""
        self._retired: Retired | None = None

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

        retired = self.who_gave_up(store) if store.rank == 0 else self._retired
        if retired is not None:
            if store.rank == 0 and store.world_size > 1:
                words = {"dead": retired.reason, "token": ""}
                _say(store, f"joint/{key}/go", words, store.world_size - 1)  # they wait for it

            raise AbortedError(f"{store.label}, rank {store.rank}, {key}: {retired.reason}")

        offer = Offer(store.rank, note, tuple(tensors))
        share = Share(key)
        share.bound = store.world_size == 1
        with self._lock:
            earlier = [pending.future for pending in self._pending]
            self._pending[share] = None

        def run() -> None:
            outcome = self._outcome(store, share, offer, work, stream)
            if isinstance(outcome, BaseException):
                let_go(outcome)

            self._settle(share, outcome)

        threading.Thread(target=run, name=f"{store.name} rank {store.rank} {key}", daemon=True).start()
        return _ThreadTicket(self, store, share, earlier)

    def _outcome(
        self, store: TensorStore, share: Share, offer: Offer, work: Work, stream: torch.cuda.Stream | None
    ) -> Done | BaseException:
        """Do this rank's part."""
        try:
            if store.rank == 0:
                notes = self._lead(store, share, offer, work, stream)
            else:
                notes = self._follow(store, share, offer, stream)

            return Done(notes, streams.record(offer.tensors[0], stream) if offer.tensors else None)
        except BaseException as error:
            if isinstance(error, StoreTimeoutError) and not share.over:
                self.give_up(store, share, store.timeout, overdue=True)

            return error

    # Giving up

    def give_up(self, store: TensorStore, share: Share, timeout: float, *, overdue: bool = False) -> bool:
        """This rank gives up: it comes to nothing any more, and is in nothing that has not begun.

        :param overdue: more time has passed than the store gives to any wait: also if this rank is in.
        :return: False if it can't, since it is in, or since the work has ended.
        """
        late = f"{_missing(store, share)} after {seconds(timeout)}"
        reason = f"rank {store.rank} gave up on {share.key}: {late}"
        with self._lock:
            if (share.bound and not overdue) or (share not in self._pending and not share.given_up):
                return False

            retired = Retired(reason, [pending.key for pending in self._pending])
            first, self._retired = self._retired is None, self._retired or retired
            dropped = [pending for pending in self._pending if not pending.bound]
            waiting = [pending for pending in dropped if pending.called and not pending.ended]
            for pending in dropped:
                pending.given_up = True

            for pending in waiting:
                pending.ended = True

        with suppress(DtorchError):  # where nothing can be said any more, that ends the others' waits
            for pending in waiting:  # some ranks may be in, and wait for nothing but the end
                _say(store, f"joint/{pending.key}/end", _end(dead=reason), store.world_size - 1)

            if first and store.world_size > 1:
                _say(store, f"joint/retired/{store.rank}", retired._asdict(), store.world_size - 1)

        if overdue:
            self._settle(share, StoreTimeoutError(f"{store.label}, rank {store.rank}, {share.key}: {late}"))

        for pending in dropped:
            self._settle(pending, AbortedError(f"{store.label}, rank {store.rank}: {reason}"))

        return True

    def who_gave_up(self, store: TensorStore, ranks: Iterable[int] | None = None) -> Retired | None:
        """Why nothing can be posted any more; looks whether another rank, of all or of ``ranks``, has said so."""
        for rank in ranks or range(store.world_size):
            if self._retired is not None:
                break

            if rank != store.rank:
                with suppress(DtorchError):  # it has not, and may have left
                    self._learn(Retired(**_hear(store, f"joint/retired/{rank}", timeout=0)))

        return self._retired

    def _learn(self, retired: Retired) -> None:
        with self._lock:
            self._retired = self._retired or retired

    def _bind(self, share: Share, token: str = "") -> str:
        """The rank is in from now on; or why it is not."""
        with self._lock:
            if share.given_up and self._retired is not None:
                return self._retired.reason

            share.bound, share.token = True, token
            return ""

    def _settle(self, share: Share, outcome: Done | BaseException) -> None:
        with self._lock:
            if share not in self._pending:
                return

            del self._pending[share]

        if isinstance(outcome, BaseException):
            share.future.set_exception(outcome)
        else:
            share.future.set_result(outcome)

    # The work

    def _follow(
        self, store: TensorStore, share: Share, offer: Offer, stream: torch.cuda.Stream | None
    ) -> Sequence[str]:
        """What every other rank does: the notes, when the work is done."""
        key, rank = f"joint/{share.key}", store.rank
        names: list[str] = []
        refused: Exception | None = None
        try:
            for number, tensor in enumerate(offer.tensors):
                name = f"{key}/{rank}/{number}"
                store.src_set(name, tensor, 1, stream=stream, writable=_may_be_written(tensor))
                names.append(name)
        except Exception as error:  # the others need not wait to hear of it
            refused = error

        words = {"note": offer.note, "tensors": len(names), **_described(refused)}
        _say(store, f"{key}/note/{rank}", words, 1)
        try:
            dead = self.who_gave_up(store, [0])  # before this rank came; its thread may have ended
            end = _end(dead=dead.reason) if dead else self._answer(store, share) or self._hear_end(store, share)
        except PeerLostError:
            retired = self.who_gave_up(store)
            if retired is None:
                raise

            end = _end(dead=retired.reason)

        share.over = True
        if end["dead"]:
            # What is published stays so, perhaps unread: the store is of no more use to its group.
            self._learn(Retired(end["dead"]))
            raise AbortedError(f"{store.label}, rank {rank}, {share.key}: {end['dead']}")

        if end["taken"]:
            for name in (*names, f"{key}/note/{rank}", f"{key}/in/{rank}"):
                store.src_wait_until_get_finished(name, stream=stream)

        if refused is not None:
            raise refused

        if end["error"]:
            raise _rebuilt(end)

        return list(end["notes"])

    def _answer(self, store: TensorStore, share: Share) -> dict[str, Any] | None:
        """Hear ``go`` and say whether this rank is in. The end, where that is known already."""
        with store.borrow(f"joint/{share.key}/go") as words:
            go = _read(words)
            if go["dead"]:
                return _end(dead=go["dead"])

            out = self._bind(share, go["token"])
            _say(store, f"joint/{share.key}/in/{store.rank}", {"out": out}, 1)

        return _end(dead=out) if out else None

    def _hear_end(self, store: TensorStore, share: Share) -> dict[str, Any]:
        """How the work ended; asked by a rank that is in."""
        at_work = _at_work.get(share.token)
        try:
            # Another process may be stopped; in this one the thread that works says how it ended, if anything can be.
            return _hear(store, f"joint/{share.key}/end", None if at_work is None else threading.TIMEOUT_MAX)
        except DtorchError:
            if at_work is not None:
                at_work.wait()  # who is told of the error has its tensors back

            raise

    def _lead(
        self, store: TensorStore, share: Share, offer: Offer, work: Work, stream: torch.cuda.Stream | None
    ) -> Sequence[str]:
        """What rank 0 does: the notes, when the work is done."""
        key, others = f"joint/{share.key}", range(1, store.world_size)
        said = []
        for rank in others:
            said.append(_hear(store, f"{key}/note/{rank}"))
            share.came += 1

        dead, offers = "", [offer]
        error: BaseException | None = None
        with _working() as token:
            self._call(store, share, token)
            try:
                for rank, words in zip(others, said, strict=True):
                    names = [f"{key}/{rank}/{number}" for number in range(words["tensors"])]
                    offers.append(Offer(rank, words["note"], tuple(store.dest_get(k, stream=stream) for k in names)))

                dead = self._all_in(store, share)
                if not dead:
                    error = next((_rebuilt(words) for words in said if words["error"]), None)
                    error = error or _worked(work, offers, stream)
            except BaseException as failure:  # the others wait for a word
                error = failure
                if isinstance(error, StoreTimeoutError):
                    self.give_up(store, share, store.timeout, overdue=True)

        share.over = True
        for each in offers[1:]:
            for number in range(len(each.tensors)):
                try:
                    store.dest_finish_get(f"{key}/{each.rank}/{number}", stream=stream)
                except DtorchError as failure:
                    error = error or failure

        notes = [each.note for each in offers]
        error = self._tell_end(store, share, _end(error, notes, dead=dead, taken=share.bound)) or error
        if dead:
            raise AbortedError(f"{store.label}, rank 0, {share.key}: {dead}")

        if error is not None:
            raise error

        return notes

    def _call(self, store: TensorStore, share: Share, token: str) -> None:
        """All have come: say so, unless this rank has given up meanwhile."""
        with self._lock:
            dead = share.given_up and self._retired
            share.called = not dead and store.world_size > 1

        if store.world_size > 1:
            words = {"dead": dead.reason if dead else "", "token": token}
            _say(store, f"joint/{share.key}/go", words, store.world_size - 1)

        if dead:
            raise AbortedError(f"{store.label}, rank 0, {share.key}: {dead.reason}")

    def _all_in(self, store: TensorStore, share: Share) -> str:
        """Hear whether all are in, and be in as well; if one is not, why."""
        if store.world_size > 1:
            store.src_wait_until_get_finished(f"joint/{share.key}/go")  # ends with a rank that leaves, too

        for rank in range(1, store.world_size):
            out: str = _hear(store, f"joint/{share.key}/in/{rank}")["out"]
            if out:
                self._learn(Retired(out))
                return out

        return self._bind(share)

    def _tell_end(self, store: TensorStore, share: Share, end: dict[str, Any]) -> DtorchError | None:
        """Tell the others, once. What came in between."""
        with self._lock:
            owed, share.ended = share.called and not share.ended, True

        try:
            if owed:
                _say(store, f"joint/{share.key}/end", end, store.world_size - 1)
                if end["taken"]:
                    store.src_wait_until_get_finished(f"joint/{share.key}/end")
        except DtorchError as failure:
            return failure

        return None


class _ThreadTicket(Ticket):
    def __init__(self, steps: FourSteps, store: TensorStore, share: Share, earlier: Sequence[Future[Done]]) -> None:
        self._steps, self._store, self._share, self._future = steps, store, share, share.future
        self._earlier = earlier

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        try:
            error = self._future.exception(timeout)
        except TimeoutError:
            before, what = self._steps.who_gave_up(self._store), _missing(self._store, self._share)
            if self._steps.give_up(self._store, self._share, timeout):
                if before is not None and self._share.key not in before.keys:  # heard of too late for the post
                    raise AbortedError(f"{self._me()}: {before.reason}") from None

                raise self.late(what, timeout) from None

            error = self._future.exception()  # it is done, or ends by itself

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
        return StoreTimeoutError(f"{self._me()}: {what} after {seconds(timeout)}")

    def _me(self) -> str:
        return f"{self._store.label}, rank {self._store.rank}, {self._share.key}"


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


@contextmanager
def _working() -> Iterator[str]:
    """While rank 0 may write to the others' tensors: the token that tells them, if they are in this process."""
    token, over = secrets.token_hex(8), threading.Event()
    _at_work[token] = over
    try:
        yield token
    finally:
        del _at_work[token]
        over.set()


def _worked(work: Work, offers: Sequence[Offer], stream: torch.cuda.Stream | None) -> Exception | None:
    """Do the work; what it raised."""
    try:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for task in work(offers):
                task()
    except Exception as error:
        return error

    return None


def _missing(store: TensorStore, share: Share) -> str:
    """Whom a share still waits for."""
    others = range(1, store.world_size)
    if share.bound:
        return "rank 0 had not told how the work ended, which may still write to this rank's tensors,"

    if store.rank != 0:
        rest = [rank for rank in others if rank != store.rank]
        return "rank 0" + (f", or one of {rank_list(rest)}," if rest else "") + " had not come"

    if share.came == store.world_size:
        return f"{rank_list(others)} had come, but did not {'all ' if len(others) > 1 else ''}answer"

    # Rank 0 listens to one after the other.
    first, *later = others[share.came - 1 :]
    return f"rank {first} had not come" + (f" ({rank_list(later)} not heard yet)" if later else "")


def _end(
    error: BaseException | None = None, notes: Sequence[str] = (), *, dead: str = "", taken: bool = False
) -> dict[str, Any]:
    """What rank 0 tells the others.

    :param dead: who gave up, so that the work was not done.
    :param taken: rank 0 has finished what the others published for it.
    """
    return {**_described(error), "notes": list(notes), "dead": dead, "taken": taken}


def _say(store: TensorStore, key: str, words: dict[str, Any], get_count: int) -> None:
    data = bytearray(json.dumps(words).encode())
    store.src_set(key, torch.frombuffer(data, dtype=torch.uint8), get_count)


def _hear(store: TensorStore, key: str, timeout: float | None = None) -> dict[str, Any]:
    with store.borrow(key, timeout=timeout) as words:
        return _read(words)


def _read(words: Tensor) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(bytes(words.tolist()))
    return said


def _described(error: BaseException | None) -> dict[str, str]:
    return {"error": type(error).__name__ if error is not None else "", "text": str(error or "")}


def _rebuilt(words: dict[str, Any]) -> Exception:
    """The error of another rank, as far as its type is one of ours."""
    name, text = words["error"], words["text"]
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
