"""What the thread that reads waits for: messages of peers, the ends of their processes, and a kick of another thread.

To fall asleep and be woken takes longer than most answers. So who waits looks again and again for a moment before it
sleeps, if the wait before was a short one; between looks it offers its core to others.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from dtorch_core._meeting.deaths import LONGEST
from dtorch_core._pauses import CROWD, Pauses
from dtorch_file_store.link import Link, ready

LOOKING = 100e-6
"""Seconds that a thread looks for messages before it sleeps. (Measured: what takes 140 us there and back between two
that sleep takes 40 us between two that look.)"""

SHORT = 10 * LOOKING
"""A wait of less seconds is a reason to look in the next one: it might have been shorter still."""


class Event(NamedTuple):
    """Something has happened."""

    source: Link | int
    """A connection; or the number of a node of which the process has ended."""
    reads: bool
    """The connection has something to read, if only that it has ended."""
    room: bool
    """It takes bytes again."""


class Watch:
    """One thread waits at a time; the rest may be called by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards what is registered; held for no call that waits."""
        self._epoll = select.epoll()
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._kick, select.EPOLLIN)
        self._links: dict[int, Link] = {}
        self._full: set[int] = set()
        self._processes: dict[int, int] = {}
        self.looking = LOOKING
        """How long a thread of this one looks."""
        self._looks = True
        """Answers have come soon of late."""
        self._pauses = Pauses()

    def add_link(self, link: Link) -> None:
        """Wait for what comes over a connection."""
        with self._lock:
            fd = link.socket.fileno()
            self._links[fd] = link
            self._epoll.register(fd, select.EPOLLIN)

    def remove_link(self, link: Link) -> None:
        """Nothing more will come."""
        with self._lock:
            fd = link.socket.fileno()
            if self._links.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def await_room(self, link: Link) -> None:
        """The peer does not read: wait until it does, too."""
        with self._lock:
            fd = link.socket.fileno()
            if fd in self._links and fd not in self._full:
                self._full.add(fd)
                self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def has_room(self, link: Link) -> None:
        """All is sent; unless another thread has left something over meanwhile, for which room is awaited already."""
        with self._lock:
            fd = link.socket.fileno()
            if fd in self._full and fd in self._links and not link.pending:
                self._full.discard(fd)
                self._epoll.modify(fd, select.EPOLLIN)

    def add_process(self, node: int, pid: int) -> None:
        """Wait for the end of a node's process. Where the kernel can't tell it, the end of its connection does."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return

        with self._lock:
            self._processes[fd] = node
            self._epoll.register(fd, select.EPOLLIN)

    def await_ends(self, nodes: Collection[int], deadline: float) -> None:
        """Wait until the processes of these nodes have ended."""
        dying = {fd for fd, node in self._processes.items() if node in nodes}
        while dying and time.monotonic() < deadline:
            dying -= ready(dying, deadline - time.monotonic())

    def kick(self) -> None:
        """Make whoever waits look up. Nobody does once this is closed, and the descriptor may be another file's."""
        with self._lock:
            if self._kick >= 0:
                os.eventfd_write(self._kick, 1)

    def wait(self, seconds: float | None) -> Iterator[Event]:
        """Wait until something has happened, or the time is over, and tell what."""
        for fd, happened in self._poll(seconds):
            link = self._links.get(fd)
            if link is not None:
                yield Event(link, bool(happened & ~select.EPOLLOUT), bool(happened & select.EPOLLOUT))
            elif fd == self._kick:
                os.eventfd_read(self._kick)
            else:
                node = self._processes.get(fd)
                if node is None:
                    continue

                yield Event(node, reads=False, room=False)
                with self._lock:  # now that it was heard: where that is interrupted, it is told once more
                    self._epoll.unregister(fd)
                    del self._processes[fd]
                    os.close(fd)

    def _poll(self, seconds: float | None) -> list[tuple[int, int]]:
        if seconds is None:
            return self._epoll.poll(None)

        poll, start = self._epoll.poll, time.monotonic()
        for _ in self.moment(seconds):
            events = poll(0)
            if events:
                return events

        events = poll(min(seconds, LONGEST))
        self._looks = time.monotonic() - start < SHORT
        return events

    def moment(self, seconds: float = math.inf) -> Iterator[None]:
        """Again and again, for as long as it is worth to look; in between the core is offered to others."""
        now = time.monotonic()
        if not self._looks or now < self._pauses.until:
            return

        self._pauses.looks += 1
        until = now + min(seconds, self.looking)
        while self._pauses.until <= now < until:
            yield
            offered = time.monotonic()
            os.sched_yield()
            now = time.monotonic()
            if now - offered > CROWD:
                self._pauses.begin(now)

    def close(self) -> None:
        """Let go of all descriptors but those of the connections."""
        while self._processes:
            fd, _ = self._processes.popitem()
            os.close(fd)

        self._epoll.close()
        with self._lock:
            kick, self._kick = self._kick, -1
            if kick >= 0:
                os.close(kick)

    def forget_fork(self) -> None:
        """In a forked child: another thread of the parent may have had the lock."""
        self._lock = threading.Lock()
        self.close()
