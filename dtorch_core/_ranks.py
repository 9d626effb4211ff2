"""One run of ranks as threads: starts them, waits for them, and ends them all when one fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtorch_core import _scope
from dtorch_core._scope import Scope
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


class Run:
    """One spawn: its threads, their results, and who failed first."""

    def __init__(self, call: Callable[[Scope], Any], devices: Sequence[str]) -> None:
        self._call, self._devices = call, devices
        rendezvous = dist.HashStore()
        self._scopes = [Scope(rank, rendezvous) for rank in range(len(devices))]
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._threads_per_rank: int | None = None
        self.results: list[Any] = [None] * len(devices)
        self.pending: set[int] = set()
        self.failures: dict[int, BaseException] = {}
        """By rank, in the order in which they came."""
        self.stopped: str | None = None
        """Why the rank that called spawn() was itself ended meanwhile."""
        self.busy: list[int] = []
        """The ranks that :meth:`end` could not end."""

    def start(self, threads: int) -> None:
        """Start the ranks; ``threads`` intra-op threads are theirs together."""
        if "OMP_NUM_THREADS" not in os.environ:
            self._threads_per_rank = max(1, threads // len(self._devices))

        for rank in range(len(self._devices)):
            thread = threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True)
            with self._changed:
                self.pending.add(rank)

            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                with self._changed:
                    self.pending.discard(rank)

                raise

            self._threads.append(thread)

    def wait(self, timeout: float | None) -> None:
        """Until all ranks have returned, or one has failed, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self.pending or self.failures or self.stopped, timeout)

    def abort(self, reason: str, *, died: bool = False) -> None:
        """End the wait: the rank that called spawn() is being ended."""
        with self._changed:
            self.stopped = self.stopped or reason
            self._changed.notify_all()

    def unfinished(self) -> set[int]:
        """The ranks that have not returned."""
        with self._changed:
            return set(self.pending)

    def end(self, reason: str, culprit: int | None = None) -> None:
        """Wake every rank from every wait of ours, the culprit's peers with its name, and give them time to return."""
        if culprit is not None:
            self._scopes[culprit].abort(reason, died=True)

        for scope in self._scopes:
            scope.abort(reason)

        with self._changed:
            self._changed.wait_for(lambda: not self.pending, GRACE)
            self.busy = sorted(self.pending)

        # What a failed rank has open would live as long as its traceback does.
        for scope in self._scopes:
            if scope.rank not in self.busy:
                scope.close()

    def join(self) -> None:
        """Wait for the threads of ranks that have returned: they have nothing left to do."""
        for rank, thread in enumerate(self._threads):
            if rank not in self.busy:
                thread.join(GRACE)

    def first_failure(self) -> tuple[int, BaseException]:
        """Who failed first."""
        with self._changed:
            return next(iter(self.failures.items()))

    def culprit(self) -> tuple[int, BaseException]:
        """The rank that failed first by itself: one that was only told of it may have been quicker to raise."""
        with self._changed:
            failures = list(self.failures.items())

        by_itself = [item for item in failures if not isinstance(root_cause(item[1]), (PeerLostError, AbortedError))]
        return (by_itself or failures)[0]

    def left_behind(self) -> str:
        """Names the ranks that are still busy; empty where all have returned."""
        if not self.busy:
            return ""

        names = ", ".join(repr(f"rank {rank}") for rank in self.busy)
        left = "was left behind as a daemon thread" if len(self.busy) == 1 else "were left behind as daemon threads"
        return f"; {rank_list(self.busy)} did not return within {seconds(GRACE)} and {left} ({names})"

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
