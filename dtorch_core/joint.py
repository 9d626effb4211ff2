"""Joint work: every rank offers tensors under one key, and when all have come the work is done on all of them.

This is what a collective needs of a store. :meth:`TensorStore.post` has a default, made of the four steps: see
:mod:`dtorch_core.joint_steps`. A store whose ranks share memory can do better: the last rank to arrive works at once,
and only the ranks that sleep are woken.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dtorch_core._futures import settle_after
from dtorch_core.errors import DtorchError


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
    kind = type(error)
    try:
        twin = copy.copy(error)
        same = str(twin) == str(error)
    except Exception:
        same = False

    if not same:  # its __init__ takes something else than the args that it leaves
        twin = kind.__new__(kind)
        twin.args = error.args
        vars(twin).update(vars(error))

    vars(twin).pop("__notes__", None)  # the cause has them
    twin.__cause__ = error
    return twin


def let_go(error: BaseException) -> None:
    """Of an error that is kept, for others to raise copies of: it forgets the frames that it came through.

    They, and those that called them, hold the tensors of all ranks, and often what keeps the error: only the cyclic
    garbage collector would end that. What is none of ours still says where it was raised, in a note.
    """
    link: BaseException | None = error
    while link is not None and link.__traceback__ is not None:
        if not isinstance(link, DtorchError):
            link.add_note("Raised here:\n" + "".join(traceback.format_tb(link.__traceback__)).rstrip())

        link.__traceback__ = None
        link = link.__cause__ or link.__context__
