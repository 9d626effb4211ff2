"""Ranks in processes of their own, seen from the process that called spawn(): starts them, hears them, ends them all.

Whatever a process does, nothing here waits for it without a bound: its line is read as far as it has come, and its
death is an event of its own (a line's end does not tell it, where a fork of it has the line as well).
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util  # registers its own part of the interpreter's end: what is registered later comes first
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dtorch_core._meeting.deaths import LONGEST
from dtorch_core._selection import authority
from dtorch_core._spawn import parcel
from dtorch_core._spawn.line import Frame, Word
from dtorch_core._spawn.rank_process import Plan
from dtorch_core._spawn.ranks import GRACE, Failure, said
from dtorch_core._spawn.settings import Settings
from dtorch_core._spawn.started_process import SLACK, RankProcess, check_may_start, no_interrupt, why_not_begun
from dtorch_core._text import one_line, rank_list, seconds
from dtorch_core.errors import RankFailedError

HEAD_START = 0.2
"""Seconds that ranks have to learn from their own stores who is gone, before spawn() wakes them with less to say."""

TERM = 0.5
"""Seconds between SIGTERM and SIGKILL."""

EXIT = 5.0
"""Seconds that an interpreter has to end once its ranks have returned."""

log = logging.getLogger("dtorch")

_live: set[ProcessRun] = set()
"""Those that may have processes."""


class ProcessRun:
    """One spawn() over processes, to its caller what ``ranks.Run`` is over threads."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        devices: dict[int, str],
        ranks_per_process: int,
        settings: Settings,
    ) -> None:
        """
        :raises TypeError: if ``fn`` is none that another process could find.
        :raises UnsupportedOperationError: if this process may not have children.
        """
        check_may_start()
        self._work = parcel.Work(fn, args)
        self._work.check()
        self._devices, self._ranks_per_process, self._settings = devices, ranks_per_process, settings
        self._processes: list[RankProcess] = []
        self._results: dict[int, bytearray] = {}
        self.failures: dict[int, Failure] = {}
        """By rank, in the order in which they came."""
        self.stopped: str | None = None
        """Why the rank that called spawn() was itself ended meanwhile."""
        self._busy: dict[int, RankProcess] = {}
        """The ranks that did not return when they were told to."""
        self._hurry = False
        self._server: dist.Store | None = None
        self._pid = os.getpid()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._wake: tuple[int, int] | None = None
        self._selector = selectors.DefaultSelector()

    def start(self, threads_per_rank: int | None) -> None:
        """Start all processes, with that many intra-op threads for each rank; None leaves them alone.

        :raises TypeError: if the work can't be pickled; then nothing was started.
        """
        _live.add(self)
        with self._lock:
            self._wake = os.pipe()
            self._selector.register(self._wake[0], selectors.EVENT_READ, lambda _: os.read(self._wake_end(), 1))
            if self.stopped is not None:
                return

        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._server = server  # here, so that it outlives every rank
        ranks, backends = list(self._devices), authority.overrides()
        for first in range(0, len(ranks), self._ranks_per_process):
            devices = {rank: self._devices[rank] for rank in ranks[first : first + self._ranks_per_process]}
            method = multiprocessing.get_start_method(allow_none=True)
            plan = Plan(devices, self._settings, threads_per_rank, server.port, os.getpid(), backends, method)
            with no_interrupt():
                process = RankProcess(plan, self._work)
                self._processes.append(process)

            self._listen(process)

    def wait(self, timeout: float | None) -> None:
        """Until all ranks have returned, or one has failed, or the time is over."""
        self._pump(lambda: bool(self.failures or self.stopped or all(one.done for one in self._processes)), timeout)

    def abort(self, reason: str, *, died: bool = False) -> None:
        """End the wait: the rank that called spawn() is being ended."""
        with self._lock:
            self.stopped = self.stopped or reason
            if self._wake is not None:
                os.write(self._wake[1], b".")

    def unfinished(self) -> set[int]:
        """The ranks that have not returned."""
        return set().union(*(one.unheard for one in self._processes))

    def end(self, reason: str, culprit: int | None = None) -> None:
        """Wake every rank from every wait of ours, give them time to return, and end the processes that are left."""
        self._hurry = True
        head_start = HEAD_START if culprit is not None else 0.0
        for process in self._processes:
            if process.began:
                process.line.send(Word.END, int(head_start * 1e3), reason.encode())
            else:
                process.signal(signal.SIGTERM)  # none of its ranks runs yet

        self._pump(self._all_exited, head_start + GRACE + SLACK)
        for process in self._processes:
            if process.began and not process.exited:
                self._busy.update(dict.fromkeys(sorted(process.unheard), process))

        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                process.signal(number)

            self._pump(self._all_exited, TERM)

    def join(self) -> None:
        """Wait for the processes, whose ranks have returned, and let go of everything."""
        try:
            self._pump(self._all_exited, 0.0 if self._hurry else EXIT)
            for process in self._processes:
                if not process.exited and not self._hurry:
                    log.warning(
                        "the process of %s (pid %s) was killed: its ranks had returned, and it did not end within %s",
                        rank_list(process.ranks), process.pid, seconds(EXIT),
                    )  # fmt: skip
        finally:
            for process in self._processes:
                process.signal(signal.SIGKILL)

            for process in self._processes:
                process.close()

            self._selector.close()
            self._server = None
            with self._lock:
                for fd in self._wake or ():
                    os.close(fd)

                self._wake = None

            _live.discard(self)
            self._over.set()

    def end_at_exit(self, deadline: float) -> None:
        """The interpreter ends, and a daemon thread is in here: it tells the ranks, and ends them."""
        if not self._over.wait(max(0.0, deadline - time.monotonic())):
            for process in list(self._processes):
                process.signal(signal.SIGKILL)

    @property
    def is_here(self) -> bool:
        """It is this process's, and not that of one that it was forked from."""
        return self._pid == os.getpid()

    def first_failure(self) -> Failure:
        """Who failed first."""
        return next(iter(self.failures.values()))

    def culprit(self) -> Failure:
        """The rank that failed first by itself: one that was only told of it may have been quicker to raise."""
        first, *others = self.failures.values()
        return first.first(others)

    def left_behind(self) -> str:
        """Names the ranks that did not return when they were told to; empty where all have returned."""
        if not self._busy:
            return ""

        pids = ", ".join(dict.fromkeys(str(process.pid) for process in self._busy.values()))
        return (
            f"; {rank_list(self._busy)} did not return within {seconds(GRACE)}, "
            f"so {'its process was' if len(self._busy) == 1 else 'their processes were'} ended (pid {pids})"
        )

    def take_results(self) -> list[Any]:
        """What the ranks returned, by rank.

        :raises RankFailedError: if that can't be unpickled here.
        """
        return [self._unwrapped(rank) for rank in self._devices]

    def _unwrapped(self, rank: int) -> Any:  # noqa: ANN401 - whatever the rank returned
        try:
            return parcel.unwrap(self._results.pop(rank))
        except Exception as error:
            raise RankFailedError(
                f"rank {rank} of {len(self._devices)} returned what can't be unpickled in the process that called "
                f"spawn(): {one_line(said(error))}",
                rank,
            ) from error

    def _listen(self, process: RankProcess) -> None:
        def on_line(events: int) -> None:
            if events & selectors.EVENT_READ:
                self._hear(process)

            if process.line.ended:
                self._selector.unregister(process.line)
            else:
                want = selectors.EVENT_READ | (0 if process.line.flush() else selectors.EVENT_WRITE)
                self._selector.modify(process.line, want, on_line)

        def on_death(_: int) -> None:
            self._selector.unregister(process.death)
            self._hear(process)
            process.exited = True
            status = process.status()
            if process.unheard and not process.done and not process.ended_here:
                self._died(process, status)

        self._selector.register(process.line, selectors.EVENT_READ | selectors.EVENT_WRITE, on_line)
        self._selector.register(process.death, selectors.EVENT_READ, on_death)

    def _hear(self, process: RankProcess) -> None:
        while (frame := process.line.receive()) is not None:
            self._take(process, frame)

    def _take(self, process: RankProcess, frame: Frame) -> None:
        rank = frame.number
        if frame.word is Word.BEGAN:
            process.began = True
        elif frame.word is Word.DONE:
            process.done = True
        elif frame.word is Word.BUSY:
            self._busy[rank] = process
        else:
            process.unheard.discard(rank)
            if frame.word is Word.RESULT:
                self._results[rank] = frame.body
            else:
                failure = parcel.unwrap_error(frame.body, rank, len(self._devices), process.pid)
                self.failures.setdefault(rank, failure)

    def _died(self, process: RankProcess, status: str) -> None:
        if self._settings.script is not None and process.began and process.succeeded:
            # By os._exit(0), as scripts end that have no time for their exit handlers. It has no result to lose.
            self._results.update({rank: bytearray(parcel.wrap(None)) for rank in process.unheard})
            process.unheard.clear()
            process.done = True
            return

        ranks, world_size = sorted(process.unheard), len(self._devices)
        who = f"{rank_list(ranks)} of {world_size} (pid {process.pid})"
        if not process.began:
            status = f"{status} before {'it' if len(ranks) == 1 else 'they'} began: {why_not_begun(status)}"
        elif len(ranks) > 1:
            status = status.replace("was killed", "were killed")

        self.failures.setdefault(
            ranks[0], Failure(ranks[0], f"{who} {status}", f"{rank_list(ranks)} (pid {process.pid}) {status}")
        )

    def _all_exited(self) -> bool:
        return all(process.exited for process in self._processes)

    def _wake_end(self) -> int:
        return self._wake[0] if self._wake is not None else -1

    def _pump(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Take what the processes say until that is true, or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            ready = self._selector.select(None if left is None else min(left, LONGEST))
            for key, events in ready:
                if key.fd in self._selector.get_map():  # not let go of by one before
                    key.data(events)

            if left is not None and left <= 0 and not ready:
                return


@atexit.register
def _end_at_exit() -> None:
    """Runs that are still under way are those of daemon threads, which nobody waits for; multiprocessing would wait for
    their processes, and has no limit."""
    runs = [run for run in list(_live) if run.is_here]
    for run in runs:
        run.abort(f"the interpreter that called spawn() (pid {os.getpid()}) ends")

    deadline = time.monotonic() + GRACE + SLACK + 2 * TERM + EXIT
    for run in runs:
        run.end_at_exit(deadline)
