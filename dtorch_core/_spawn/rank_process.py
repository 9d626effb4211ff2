"""One process of ranks: runs them as threads, tells how each ends, and ends itself when it should.

Two of its threads are not ranks. The main one tells; the other one listens to the process that called spawn(), so
that neither waits for the other.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass

import torch.distributed as dist

from dtorch_core._scope import Scope
from dtorch_core._selection.authority import use_backend
from dtorch_core._selection.reasons import Kind
from dtorch_core._spawn import parcel
from dtorch_core._spawn.line import Line, Word
from dtorch_core._spawn.rank_context import RankContext
from dtorch_core._spawn.ranks import GRACE, Run, said
from dtorch_core._spawn.settings import Settings
from dtorch_core._text import one_line
from dtorch_core._thread_ranks import signals

FAILED = 1
"""Exit status of a process in which a rank has failed, or was ended; it has told its caller more."""

ALONE = 2
"""Exit status of a process whose caller is gone."""

_SLACK = 1.0
"""Seconds beyond :data:`GRACE` that a process whose caller is gone has before it ends, whatever it does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process is for."""

    devices: dict[int, str]
    """The device of each of its ranks."""
    settings: Settings
    """What they have of their own."""
    threads_per_rank: int | None
    """Intra-op threads; None leaves them alone."""
    port: int
    """Where the process that called spawn() serves the rendezvous."""
    caller: int
    """Its pid."""
    backends: dict[Kind, str]
    """What it asks for by ``use_backend``."""
    start_method: str | None
    """How it starts processes of :mod:`multiprocessing`; None is Python's own way."""


def main(end: socket.socket, plan: Plan, _: object) -> None:
    """Run the plan's ranks. Their work comes by the line."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the caller as well, and it ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signals.outlive_handled()
    multiprocessing.set_start_method(plan.start_method, force=True)  # a spawned process would spawn, unasked
    gc.freeze()  # what has been imported lasts anyway; to look through it once more at the end takes half a second
    caller = _Caller(Line(end, waits=True), plan)
    run: Run | None = None
    try:
        run = _run(plan, caller)
    except BaseException as error:  # before the ranks ran: it is the failure of each of them
        for rank in plan.devices:
            caller.line.send(Word.FAILURE, rank, parcel.wrap_error(error))

    caller.line.send(Word.DONE)
    caller.over.set()
    if run is not None and run.busy:
        # What a rank is still doing must not keep the interpreter from ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)

    if run is None or run.failures:
        sys.exit(FAILED)


class _Caller:
    """The process that called spawn(), as seen from here."""

    def __init__(self, line: Line, plan: Plan) -> None:
        self.line = line
        self.work: Future[bytearray] = Future()
        self.head_start = 0.0
        """Seconds that the ranks have before they are woken, once the run is stopped."""
        self.over = threading.Event()
        """Set when all has been said."""
        self._plan = plan
        self._lock = threading.Lock()
        self._run: Run | None = None
        self._ended: str | None = None
        threading.Thread(target=self._listen, name="dtorch: the caller of spawn()", daemon=True).start()

    def watches(self, run: Run) -> None:
        """End this run when the caller says so, or is gone."""
        with self._lock:
            self._run, ended = run, self._ended

        if ended is not None:
            run.abort(ended)

    def _listen(self) -> None:
        lost = select.poll()
        lost.register(self.line, select.POLLIN)
        try:
            # A fork of the caller may keep the line's other end open.
            pidfd = os.pidfd_open(self._plan.caller)
            lost.register(pidfd, select.POLLIN)
        except (AttributeError, OSError):
            pidfd = -1
            if os.getppid() != self._plan.caller:
                self._leave()

        while not any(fd == pidfd for fd, _ in lost.poll()):
            frame = self.line.receive()
            if frame is None:
                break

            if frame.word is Word.WORK:
                self.work.set_result(frame.body)
            else:
                self.head_start = frame.number / 1e3
                self._end(frame.body.decode())

        self._leave()

    def _end(self, reason: str) -> None:
        with self._lock:
            self._ended, run = reason, self._run

        if run is not None:
            run.abort(reason)

    def _leave(self) -> None:
        """Nobody is left to end this process. Its ranks may say goodbye."""
        self._end(f"the process that called spawn() (pid {self._plan.caller}) is gone")
        if self._run is not None:
            self.over.wait(GRACE + _SLACK)

        os._exit(ALONE)


def _run(plan: Plan, caller: _Caller) -> Run:
    """The run, once it is over."""
    fn, args = parcel.unwrap_work(caller.work.result())
    rendezvous = dist.TCPStore("127.0.0.1", plan.port, is_master=False, wait_for_workers=False)

    def call(scope: Scope) -> bytes:
        with plan.settings.entered(scope):
            context = RankContext(scope.rank, plan.settings.world_size, plan.devices[scope.rank], scope)
            result = fn(context, *args)

        # In the rank's own thread: what its current stream has to do comes before.
        return _wrapped(result, scope.rank)

    run = Run(call, plan.devices, rendezvous)
    with plan.settings.held(plan.devices.values()), use_backend(**plan.backends) if plan.backends else nullcontext():
        caller.watches(run)
        caller.line.send(Word.BEGAN)
        try:
            run.start(plan.threads_per_rank)
        except BaseException as error:
            run.end(f"{said(error)}: not all ranks could be started")
            raise

        _tell(run, plan, caller)
        run.join()

    return run


def _wrapped(result: object, rank: int) -> bytes:
    try:
        return parcel.wrap(result)
    except Exception as error:
        raise TypeError(
            f"what rank {rank} returned, {parcel.kind(result)}, can't be pickled for the process that called spawn(): "
            f"{one_line(said(error))}"
        ) from error


def _tell(run: Run, plan: Plan, caller: _Caller) -> None:
    """Say how each rank ends, and end the others when one fails."""
    told: set[int] = set()

    def tell(ended: set[int]) -> None:
        for rank in sorted(ended):
            told.add(rank)
            if rank in run.failures:
                caller.line.send(Word.FAILURE, rank, parcel.wrap_error(run.failures[rank]))
            else:
                caller.line.send(Word.RESULT, rank, run.results[rank])
                run.results[rank] = None

    while len(told) < len(plan.devices) and not run.failures and run.stopped is None:
        tell(run.ended(told))

    if run.failures:
        tell(run.over() - told)  # its caller ends the other processes meanwhile
        first = run.first_failure()
        run.end(first.reason, first.rank)
    elif run.stopped is not None:
        run.end(run.stopped, head_start=caller.head_start)

    tell(run.over() - told)
    for rank in run.busy:
        caller.line.send(Word.BUSY, rank)
