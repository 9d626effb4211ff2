"""One run of ranks as threads: starts them, waits for them, and ends them all when one fails."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtorch_core import _scope
from dtorch_core._meeting.board import Board, lines_to
from dtorch_core._scope import Scope
from dtorch_core._selection.registry import registry
from dtorch_core._text import rank_list, root_cause, seconds
from dtorch_core.errors import AbortedError, PeerLostError

GRACE = 1.0
"""Seconds that the other ranks have to return once one has failed and all their waits were ended."""


class IntraOp:
    """Divides torch's intra-op threads among ranks; the number is the process's, so the last run to end restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._whole = 0

    def enter(self) -> int:
        """A run begins: the caller's number of threads, which is to be divided."""
        own = torch.get_num_threads()
        with self._lock:
            if self._runs == 0:
                self._whole = own

            self._runs += 1
            return own

    def leave(self, own: int) -> None:
        """The run is over; ``own`` is what :meth:`enter` gave."""
        with self._lock:
            self._runs -= 1
            torch.set_num_threads(own if self._runs else self._whole)


intra_op = IntraOp()


def divided(threads: int, ranks: int) -> int | None:
    """The intra-op threads of each of ``ranks`` that have ``threads`` together; None where they are left alone."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, threads // ranks)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed, as :func:`dtorch_core.spawn` tells it."""

    rank: int
    headline: str
    """``"rank 2 of 4 failed with ValueError: no"``"""
    reason: str
    """Why the others are ended: ``"rank 2 failed: ValueError: no"``"""
    error: BaseException | None = None
    traceback: str = ""
    """With a line of its own above it."""
    told: bool = False
    """It only heard of another rank's end, or of its own."""

    @classmethod
    def of(cls, rank: int, world_size: int, error: BaseException) -> Failure:
        """Of a rank that raised ``error`` in a thread of this process."""
        text = "".join(traceback.format_exception(error))
        return cls.told_as(rank, world_size, said(error), text, is_told(error), error)

    @classmethod
    def told_as(
        cls, rank: int, world_size: int, what: str, text: str, told: bool, error: BaseException, process: str = ""
    ) -> Failure:
        """Of a rank that raised ``error``.

        :param what: the error in one line, ``"ValueError: no"``.
        :param text: its traceback.
        :param process: where that was, if it was not here: ``" (pid 12)"``.
        """
        return cls(
            rank,
            f"rank {rank} of {world_size} failed with {what}",
            f"rank {rank} failed: {what}",
            error,
            f"Traceback of rank {rank}{process}:\n{text}",
            told,
        )

    def first(self, others: Collection[Failure]) -> Failure:
        """Of ``self`` and those that came later, the first that failed by itself: who was told may be quicker."""
        return next((failure for failure in (self, *others) if not failure.told), self)


def said(error: BaseException) -> str:
    """``"ValueError: no"``, whatever class the error is of."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: its message can't be printed"


def is_told(error: BaseException) -> bool:
    """Whether the error comes from another rank's end."""
    return isinstance(root_cause(error), (PeerLostError, AbortedError))


class Run:
    """Ranks that are threads of this process: their results, and who failed first.

    :param call: what each rank does, in its scope.
    :param devices: the rank's device, for each rank that runs here.
    :param rendezvous: where their names meet, by a connection that nobody else uses; one of their own where None.
    """

    def __init__(
        self, call: Callable[[Scope], Any], devices: Mapping[int, str], rendezvous: dist.Store | None = None
    ) -> None:
        self._call, self._devices = call, devices
        lines = lines_to(dist.HashStore() if rendezvous is None else rendezvous)
        self._scopes = {rank: Scope(rank, Board(lines, "this spawn"), device) for rank, device in devices.items()}
        self._changed = threading.Condition()
        self._threads: dict[int, threading.Thread] = {}
        self._threads_per_rank: int | None = None
        self.results: dict[int, Any] = dict.fromkeys(devices)
        self.pending: set[int] = set()
        self.failures: dict[int, BaseException] = {}
        """By rank, in the order in which they came."""
        self.stopped: str | None = None
        """Why the rank that called spawn() was itself ended meanwhile."""
        self.busy: list[int] = []
        """The ranks that :meth:`end` could not end."""

    def start(self, threads_per_rank: int | None) -> None:
        """Start the ranks, with that many intra-op threads each; None leaves them alone."""
        registry()  # once here, rather than in every rank at the same time
        self._threads_per_rank = threads_per_rank
        for rank in self._devices:
            thread = threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True)
            with self._changed:
                self.pending.add(rank)

            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                with self._changed:
                    self.pending.discard(rank)

                raise

            self._threads[rank] = thread

    def wait(self, timeout: float | None) -> None:
        """Until all ranks have returned, or one has failed, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self.pending or self.failures or self.stopped, timeout)

    def ended(self, known: Collection[int]) -> set[int]:
        """The ranks that have ended beyond those that are ``known``. Waits for one, unless the run is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or not self.pending or self.over() - set(known))
            return self.over() - set(known)

    def over(self) -> set[int]:
        """The ranks that have ended."""
        return set(self._devices) - self.unfinished()

    def abort(self, reason: str, *, died: bool = False) -> None:
        """End the wait: the rank that called spawn() is being ended."""
        with self._changed:
            self.stopped = self.stopped or reason
            self._changed.notify_all()

    def unfinished(self) -> set[int]:
        """The ranks that have not returned."""
        with self._changed:
            return set(self.pending)

    def end(self, reason: str, culprit: int | None = None, head_start: float = 0.0) -> None:
        """Wake every rank from every wait of ours, the culprit's peers with its name, and give them time to return.

        :param head_start: seconds in which they may return before they are woken.
        """
        if head_start:
            with self._changed:
                self._changed.wait_for(lambda: not self.pending, head_start)

        if culprit is not None:
            self._scopes[culprit].abort(reason, died=True)

        for scope in self._scopes.values():
            scope.abort(reason)

        with self._changed:
            self._changed.wait_for(lambda: not self.pending, GRACE)
            self.busy = sorted(self.pending)

        # What a failed rank has open would live as long as its traceback does.
        for scope in self._scopes.values():
            if scope.rank not in self.busy:
                scope.close()

    def join(self) -> None:
        """Wait for the threads of ranks that have returned: they have nothing left to do. What failed is forgotten."""
        for rank, thread in self._threads.items():
            if rank not in self.busy:
                thread.join(GRACE)

        with self._changed:
            self.failures.clear()  # their tracebacks lead back to here

    def first_failure(self) -> Failure:
        """Who failed first."""
        return self._told()[0]

    def culprit(self) -> Failure:
        """The rank that failed first by itself: one that was only told of it may have been quicker to raise."""
        first, *others = self._told()
        return first.first(others)

    def take_results(self) -> list[Any]:
        """What the ranks returned, by rank."""
        return list(self.results.values())

    def left_behind(self) -> str:
        """Names the ranks that are still busy; empty where all have returned."""
        if not self.busy:
            return ""

        names = ", ".join(repr(f"rank {rank}") for rank in self.busy)
        left = "was left behind as a daemon thread" if len(self.busy) == 1 else "were left behind as daemon threads"
        return f"; {rank_list(self.busy)} did not return within {seconds(GRACE)} and {left} ({names})"

    def _told(self) -> list[Failure]:
        with self._changed:
            return [Failure.of(rank, len(self._devices), error) for rank, error in self.failures.items()]

    def _rank(self, rank: int) -> None:
        error: BaseException | None = None
        scope = self._scopes[rank]
        _scope.enter(scope)
        try:
            if self._threads_per_rank is not None:
                torch.set_num_threads(self._threads_per_rank)

            if self._devices[rank] != "cpu":
                torch.cuda.set_device(self._devices[rank])

            self.results[rank] = self._call(scope)
            scope.close()
        except BaseException as failure:  # SystemExit and KeyboardInterrupt in a rank end the run too
            error = failure
        finally:
            _scope.enter(None)
            with self._changed:
                self.pending.discard(rank)
                if error is not None:
                    self.failures[rank] = error

                self._changed.notify_all()

            # Its traceback leads here. Such a circle would keep all that a failed rank had, promises that end with it
            # too, until Python's collector comes by.
            error = None
