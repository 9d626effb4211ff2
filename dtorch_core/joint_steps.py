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

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from dtorch_core import streams
from dtorch_core._joint_shares import Done, Retired, Share, Shares
from dtorch_core._joint_tickets import ThreadTicket
from dtorch_core._joint_words import described, end_words, hear, read, rebuilt, say
from dtorch_core.checks import check_written
from dtorch_core.errors import (
    AbortedError,
    DtorchError,
    PeerLostError,
    StoreTimeoutError,
    UnsupportedTensorError,
)
from dtorch_core.joint import Offer, Ticket, Work, let_go

if TYPE_CHECKING:
    from torch import Tensor

    from dtorch_core.store import TensorStore

_at_work: dict[str, threading.Event] = {}
"""By its token, work for which rank 0, in this process, has called; set when it writes to no tensor any more."""


class FourSteps:
    """Of one rank's handle. Each post has a thread, since the four steps block."""

    def __init__(self) -> None:
        self._shares = Shares()

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

        retired = self._shares.who_gave_up(store) if store.rank == 0 else self._shares.retired
        if retired is not None:
            if store.rank == 0 and store.world_size > 1:
                words = {"dead": retired.reason, "token": ""}
                say(store, f"joint/{key}/go", words, store.world_size - 1)  # they wait for it

            raise AbortedError(f"{store.label}, rank {store.rank}, {key}: {retired.reason}")

        offer = Offer(store.rank, note, tuple(tensors))
        share = Share(key)
        share.bound = store.world_size == 1
        earlier = self._shares.begin(share)

        def run() -> None:
            outcome = self._outcome(store, share, offer, work, stream)
            if isinstance(outcome, BaseException):
                let_go(outcome)

            self._shares.settle(share, outcome)

        threading.Thread(target=run, name=f"{store.name} rank {store.rank} {key}", daemon=True).start()
        return ThreadTicket(self._shares, store, share, earlier)

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
                self._shares.give_up(store, share, store.timeout, overdue=True)

            return error

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

        words = {"note": offer.note, "tensors": len(names), **described(refused)}
        say(store, f"{key}/note/{rank}", words, 1)
        try:
            dead = self._shares.who_gave_up(store, [0])  # before this rank came; its thread may have ended
            end = end_words(dead=dead.reason) if dead else self._answer(store, share) or self._hear_end(store, share)
        except PeerLostError:
            retired = self._shares.who_gave_up(store)
            if retired is None:
                raise

            end = end_words(dead=retired.reason)

        share.over = True
        if end["dead"]:
            # What is published stays so, perhaps unread: the store is of no more use to its group.
            self._shares.learn(Retired(end["dead"]))
            raise AbortedError(f"{store.label}, rank {rank}, {share.key}: {end['dead']}")

        if end["taken"]:
            for name in (*names, f"{key}/note/{rank}", f"{key}/in/{rank}"):
                store.src_wait_until_get_finished(name, stream=stream)

        if refused is not None:
            raise refused

        if end["error"]:
            raise rebuilt(end)

        return list(end["notes"])

    def _answer(self, store: TensorStore, share: Share) -> dict[str, Any] | None:
        """Hear ``go`` and say whether this rank is in. The end, where that is known already."""
        with store.borrow(f"joint/{share.key}/go") as words:
            go = read(words)
            if go["dead"]:
                return end_words(dead=go["dead"])

            out = self._shares.bind(share, go["token"])
            say(store, f"joint/{share.key}/in/{store.rank}", {"out": out}, 1)

        return end_words(dead=out) if out else None

    def _hear_end(self, store: TensorStore, share: Share) -> dict[str, Any]:
        """How the work ended; asked by a rank that is in."""
        at_work = _at_work.get(share.token)
        try:
            # Another process may be stopped; in this one the thread that works says how it ended, if anything can be.
            return hear(store, f"joint/{share.key}/end", None if at_work is None else threading.TIMEOUT_MAX)
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
            said.append(hear(store, f"{key}/note/{rank}"))
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
                    error = next((rebuilt(words) for words in said if words["error"]), None)
                    error = error or _worked(work, offers, stream)
            except BaseException as failure:  # the others wait for a word
                error = failure
                if isinstance(error, StoreTimeoutError):
                    self._shares.give_up(store, share, store.timeout, overdue=True)

        share.over = True
        for each in offers[1:]:
            for number in range(len(each.tensors)):
                try:
                    store.dest_finish_get(f"{key}/{each.rank}/{number}", stream=stream)
                except DtorchError as failure:
                    error = error or failure

        notes = [each.note for each in offers]
        error = self._tell_end(store, share, end_words(error, notes, dead=dead, taken=share.bound)) or error
        if dead:
            raise AbortedError(f"{store.label}, rank 0, {share.key}: {dead}")

        if error is not None:
            raise error

        return notes

    def _call(self, store: TensorStore, share: Share, token: str) -> None:
        """All have come: say so, unless this rank has given up meanwhile."""
        dead = self._shares.owe_end(share, store.world_size)
        if store.world_size > 1:
            words = {"dead": dead.reason if dead else "", "token": token}
            say(store, f"joint/{share.key}/go", words, store.world_size - 1)

        if dead:
            raise AbortedError(f"{store.label}, rank 0, {share.key}: {dead.reason}")

    def _all_in(self, store: TensorStore, share: Share) -> str:
        """Hear whether all are in, and be in as well; if one is not, why."""
        if store.world_size > 1:
            store.src_wait_until_get_finished(f"joint/{share.key}/go")  # ends with a rank that leaves, too

        for rank in range(1, store.world_size):
            out: str = hear(store, f"joint/{share.key}/in/{rank}")["out"]
            if out:
                self._shares.learn(Retired(out))
                return out

        return self._shares.bind(share)

    def _tell_end(self, store: TensorStore, share: Share, end: dict[str, Any]) -> DtorchError | None:
        """Tell the others, once. What came in between."""
        try:
            if self._shares.take_end(share):
                say(store, f"joint/{share.key}/end", end, store.world_size - 1)
                if end["taken"]:
                    store.src_wait_until_get_finished(f"joint/{share.key}/end")
        except DtorchError as failure:
            return failure

        return None


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


def _may_be_written(tensor: Tensor) -> bool:
    """No two of its elements share memory. Results are checked to be so; what is not is an input, and only read."""
    try:
        check_written("post", tensor)
    except UnsupportedTensorError:
        return False

    return True
