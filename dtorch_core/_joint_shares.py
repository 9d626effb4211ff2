"""One rank's shares in joint work of four steps: how each ends, and how the rank gives up on them.

Who gives up comes to nothing any more, and says so to all; but nobody gives up a share that it is in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from dtorch_core._joint_words import end_words, hear, say
from dtorch_core._text import rank_list, seconds
from dtorch_core.errors import AbortedError, DtorchError, StoreTimeoutError

if TYPE_CHECKING:
    from dtorch_core.store import TensorStore


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
    """In a piece of joint work. What other threads than its own change too is under the lock of :class:`Shares`."""

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


class Shares:
    """Those that one rank's handle has begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[Share, None] = {}
        """In the order in which they were posted."""
        self.retired: Retired | None = None
        """Why nothing can be posted any more, as far as this rank has heard."""

    def begin(self, share: Share) -> list[Future[Done]]:
        """Keep it until it is settled. What was begun before and is not done."""
        with self._lock:
            earlier = [pending.future for pending in self._pending]
            self._pending[share] = None

        return earlier

    def give_up(self, store: TensorStore, share: Share, timeout: float, *, overdue: bool = False) -> bool:
        """This rank gives up: it comes to nothing any more, and is in nothing that has not begun.

        :param overdue: more time has passed than the store gives to any wait: also if this rank is in.
        :return: False if it can't, since it is in, or since the work has ended.
        """
        late = f"{missing(store, share)} after {seconds(timeout)}"
        reason = f"rank {store.rank} gave up on {share.key}: {late}"
        with self._lock:
            if (share.bound and not overdue) or (share not in self._pending and not share.given_up):
                return False

            retired = Retired(reason, [pending.key for pending in self._pending])
            first, self.retired = self.retired is None, self.retired or retired
            dropped = [pending for pending in self._pending if not pending.bound]
            waiting = [pending for pending in dropped if pending.called and not pending.ended]
            for pending in dropped:
                pending.given_up = True

            for pending in waiting:
                pending.ended = True

        with suppress(DtorchError):  # where nothing can be said any more, that ends the others' waits
            for pending in waiting:  # some ranks may be in, and wait for nothing but the end
                say(store, f"joint/{pending.key}/end", end_words(dead=reason), store.world_size - 1)

            if first and store.world_size > 1:
                say(store, f"joint/retired/{store.rank}", retired._asdict(), store.world_size - 1)

        if overdue:
            self.settle(share, StoreTimeoutError(f"{store.label}, rank {store.rank}, {share.key}: {late}"))

        for pending in dropped:
            self.settle(pending, AbortedError(f"{store.label}, rank {store.rank}: {reason}"))

        return True

    def who_gave_up(self, store: TensorStore, ranks: Iterable[int] | None = None) -> Retired | None:
        """Why nothing can be posted any more; looks whether another rank, of all or of ``ranks``, has said so."""
        for rank in ranks or range(store.world_size):
            if self.retired is not None:
                break

            if rank != store.rank:
                with suppress(DtorchError):  # it has not, and may have left
                    self.learn(Retired(**hear(store, f"joint/retired/{rank}", timeout=0)))

        return self.retired

    def learn(self, retired: Retired) -> None:
        """A rank has given up; the first that is heard of counts."""
        with self._lock:
            self.retired = self.retired or retired

    def bind(self, share: Share, token: str = "") -> str:
        """The rank is in from now on; or why it is not."""
        with self._lock:
            if share.given_up and self.retired is not None:
                return self.retired.reason

            share.bound, share.token = True, token
            return ""

    def owe_end(self, share: Share, world_size: int) -> Retired | None:
        """Rank 0 is about to say ``go``, and owes an ``end`` then; or why it can't, since it has given up."""
        with self._lock:
            dead = self.retired if share.given_up else None
            share.called = dead is None and world_size > 1

        return dead

    def take_end(self, share: Share) -> bool:
        """Whether rank 0 still owes the ``end``: who is told so says it."""
        with self._lock:
            owed, share.ended = share.called and not share.ended, True

        return owed

    def settle(self, share: Share, outcome: Done | BaseException) -> None:
        """It ended; what ended it first counts."""
        with self._lock:
            if share not in self._pending:
                return

            del self._pending[share]

        if isinstance(outcome, BaseException):
            share.future.set_exception(outcome)
        else:
            share.future.set_result(outcome)


def missing(store: TensorStore, share: Share) -> str:
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
