"""The processes of an opening's other ranks: one that ends while it is opened is told to all who wait for it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping

from dtorch_core._selection.topology import Member, Topology
from dtorch_core._text import rank_list

LATE = 0.05
"""Seconds between the end of a process's connections and its own, and more than that."""

LONGEST = 1e6
"""Seconds, for one wait of the kernel's: it takes no more than three weeks, and programs write "no limit" as a year.
Who waits for longer asks again."""

LAST = 5.0
"""Seconds to tell of a death."""


def others(topology: Topology, member: Member) -> dict[int, tuple[Member, ...]]:
    """The other processes that a member can see: by pid, with their ranks."""
    processes = topology.by_process()
    return {pid: ranks for (host, pid), ranks in processes.items() if host == member.host and pid != member.pid}


def described(ranks: Iterable[Member]) -> str:
    """``"rank 1 (pid 12)"``, for the ranks of one process."""
    ranks = list(ranks)
    return f"{rank_list(member.rank for member in ranks)} (pid {ranks[0].pid})"


def first_ended(processes: Mapping[int, tuple[Member, ...]], seconds: float = LATE) -> str:
    """One of the processes that have ended, as messages name it; empty where none does within so many seconds."""
    with Pidfds(processes) as pidfds:
        ended = pidfds.wait(seconds)
        return "" if ended is None else described(processes[ended])


class Pidfds:
    """Tell the ends of processes; a context manager. Where the system can't, none ends."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._ended: int | None = None
        self._poll = select.poll()
        self._pids: dict[int, int] = {}
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended = pid
            except (AttributeError, OSError):  # not Linux, or no descriptor left
                continue
            else:
                self._pids[fd] = pid
                self._poll.register(fd, select.POLLIN)

    def __enter__(self) -> Pidfds:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._pids:
            os.close(fd)

    def wait(self, seconds: float | None, kick: int = -1) -> int | None:
        """The first one that has ended.

        :param kick: a descriptor that ends the wait, too, when it can be read.
        """
        if self._ended is not None:
            return self._ended

        if kick >= 0:
            self._poll.register(kick, select.POLLIN)

        ready = [fd for fd, _ in self._poll.poll(None if seconds is None else 1e3 * seconds)]
        return None if kick in ready or not ready else self._pids[ready[0]]


class Deaths:
    """A thread that waits for the end of a process, as long as this is not closed."""

    def __init__(self, processes: Mapping[int, tuple[Member, ...]], on_death: Callable[[str], None], name: str) -> None:
        """
        :param on_death: called once, by that thread, with the process that has ended, as messages name it.
        """
        self._processes, self._on_death = processes, on_death
        self._kick = -1
        self._thread: threading.Thread | None = None
        if hasattr(os, "pidfd_open"):
            self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._wait, name=f"{name}: deaths", daemon=True)
            self._thread.start()

    def _wait(self) -> None:
        with Pidfds(self._processes) as pidfds:
            ended = pidfds.wait(None, self._kick)

        if ended is not None:
            self._on_death(described(self._processes[ended]))

    def close(self) -> None:
        """Wait for nothing more."""
        if self._thread is not None:
            os.eventfd_write(self._kick, 1)
            self._thread.join(LAST)
            os.close(self._kick)
            self._thread = None
