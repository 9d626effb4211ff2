"""One of the processes of spawn(), as the process that starts it sees it; and who may start one, and how."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess

from dtorch_core._spawn import parcel as _parcel
from dtorch_core._spawn.line import Line, Word
from dtorch_core._spawn.rank_process import Plan, main
from dtorch_core._text import rank_list
from dtorch_core.errors import UnsupportedOperationError

SLACK = 1.0
"""Seconds beyond ``ranks.GRACE`` in which a process, on a busy machine, ends by itself."""

UNGUARDED = 86
"""Exit status of an interpreter whose main module calls spawn() as it is imported."""


class RankProcess:
    """One of the processes: its ranks, and what it has said so far."""

    def __init__(self, plan: Plan, work: _parcel.Work) -> None:
        """Start it.

        :raises TypeError: if the work can't be pickled.
        """
        self.ranks = list(plan.devices)
        self.unheard = set(plan.devices)
        """Those of its ranks whose end it has not told."""
        self.began = self.done = self.exited = self.ended_here = False
        ours, theirs = socket.socketpair()
        self.line = Line(ours, waits=False)
        self._process: SpawnProcess = multiprocessing.get_context("spawn").Process(
            target=main, args=(theirs, plan, work), name=f"dtorch: {rank_list(self.ranks)}"
        )
        try:
            with theirs:
                self._process.start()

            self.pid = self._process.pid
            self.death = self._watch_death()
        except BaseException:
            ours.close()  # which ends it, if it was started
            raise

        self.line.send(Word.WORK, 0, work.parcel)

    def _watch_death(self) -> int:
        try:
            return os.pidfd_open(self._process.pid or 0)
        except (AttributeError, OSError):  # not Linux, or not allowed: ends only with its forks
            return os.dup(self._process.sentinel)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; it has ended by our hand then."""
        if not self.exited:
            self.ended_here = True
            (self._process.kill if number == signal.SIGKILL else self._process.terminate)()

    def status(self) -> str:
        """How it ended: ``"was killed by SIGKILL"``. Takes its exit status."""
        code = self._exit_code()
        if code is None:
            return "ended, and its exit status was taken by somebody else"

        if code >= 0:
            return f"ended with exit status {code}"

        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"

        return f"was killed by {name}"

    @property
    def succeeded(self) -> bool:
        """It has ended, with the exit status of a success."""
        return self._exit_code() == 0

    def close(self) -> None:
        """Let go of what belongs to it. It has ended."""
        self.line.close()
        os.close(self.death)
        if self._exit_code() is not None:
            self._process.close()

    def _exit_code(self) -> int | None:
        if self._process.exitcode is None:
            self._process.join(SLACK)

        return self._process.exitcode


def why_not_begun(status: str) -> str:
    """Why a process that ended so, as its ``status()`` says it, did not begin."""
    if status.endswith(f" {UNGUARDED}"):
        return (
            "the main module calls spawn() while it is imported, and each new process imports it. Put the call under "
            "if __name__ == '__main__':"
        )

    return "the new interpreter could not import the main module, or dtorch; what it said is on stderr"


def check_may_start() -> None:
    """
    :raises UnsupportedOperationError: if this process may not have children.
    """
    current = multiprocessing.current_process()
    if getattr(current, "_inheriting", False):
        # multiprocessing refuses this as well, by an error that a main module could catch and go on.
        sys.stderr.write(
            f"dtorch: pid {os.getpid()} was started by spawn(), imports the main module, and is asked by it to spawn() "
            f"again. Put the call under if __name__ == '__main__':\n"
        )
        raise SystemExit(UNGUARDED)

    if current.daemon:
        raise UnsupportedOperationError(
            f"spawn: {current.name} is a daemonic process of multiprocessing, which may not have children; start it "
            f"with daemon=False, or use ranks_as='threads'"
        )


@contextmanager
def no_interrupt() -> Iterator[None]:
    """What is started in here does not hear Ctrl-C until it unblocks it: a new interpreter would print a traceback."""
    resource_tracker.ensure_running()  # its first start, which comes with a process, would unblock it here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
