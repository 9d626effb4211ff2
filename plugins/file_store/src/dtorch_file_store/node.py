"""One process of a session: its connections to the others, and the threads that wait for what they say.

There is no hub and nothing shared but memory: each node keeps the state that its own ranks have made, tells the others
by messages, and reads theirs: see :mod:`dtorch_file_store.reading`. A node's state is guarded by one mutex, held for
microseconds: nobody sleeps, calls torch or sends under it.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from dtorch_core._text import rank_list
from dtorch_core.presence import Presence
from dtorch_file_store.jobs import Again, Jobs
from dtorch_file_store.link import Link, ready
from dtorch_file_store.processes import is_alive
from dtorch_file_store.reading import Reading
from dtorch_file_store.waiting import Notice, Waiter
from dtorch_file_store.watch import Watch
from dtorch_file_store.wire import Message

CORES = 2
"""For each process: so many, and its peers and its own other threads work on while a thread of it looks for long."""

LINGER = 1.0
"""Seconds that a node which closes gives to peers that do not read, for its last words."""

Handler = Callable[[int, Message], Iterable[Waiter]]
"""Takes a peer's number and a message, under the mutex; returns the waiters that it has settled."""


class Node:
    """This process's side of a session."""

    def __init__(self, label: str, index: int, homes: Sequence[int], pids: Sequence[int]) -> None:
        """
        :param index: this node's number.
        :param homes: the node of each rank.
        :param pids: the process of each rank.
        """
        self.index = index
        self.homes = homes
        self.own_ranks = self.ranks_at(index)
        """The ranks of this node."""
        self.pid = os.getpid()
        self.presence = Presence(label, pids)
        self.presence.all_said = False  # until it is: see Session
        self.mutex = self.presence.mutex
        self.links: dict[int, Link] = {}
        self.handlers: dict[str, Handler] = {}
        self.on_lost: Callable[[], Iterable[Waiter]] = tuple
        """Called under the mutex when a process has died: the waiters that this settles."""
        self.on_gone: Callable[[int], Iterable[Waiter]] = lambda node: ()
        """Called under the mutex with a node that has nothing more to say."""
        self.on_dead: Callable[[int], None] = lambda node: None
        """Called when a node's process is wholly gone: later than its connection, if it did not say goodbye."""
        self.on_torn: Callable[[str], Iterable[Waiter]] = lambda why: ()
        """Called under the mutex when this node's state can't be trusted any more: the waiters that this settles."""
        self.on_end: Callable[[], None] = lambda: None
        """Called once, when all is closed and sent."""
        self.owes: Callable[[], None] | None = None
        """Tells what may wait until something is told anyway: called before that, once. Under the mutex."""
        self._due = False
        """Some link's messages are."""
        self._watch = Watch()
        self._reading = Reading(self.presence, self._hear, self._heard, self._watch.kick)
        self.gone: set[int] = set()
        """Nodes that have nothing more to say."""
        self.jobs = Jobs()
        """Whoever comes to the next :meth:`after` does them."""
        self._here = self.jobs.here
        self._killed: set[int] = set()
        """Those whose process ended without a goodbye."""
        self.trash: list[object] = []
        """What is let go outside the mutex, with the next :meth:`after`: it may hold tensors."""
        self.forked = False

    # Peers

    def connect(self, links: Iterable[Link]) -> None:
        """Take over the connections; from now on a peer's death is noticed."""
        for link in links:
            self.links[link.peer] = link
            self._watch.add_link(link)
            pid = next(pid for pid, home in zip(self.presence.pids, self.homes, strict=True) if home == link.peer)
            if pid != self.pid:
                self._watch.add_process(link.peer, pid)

        for link in self.links.values():
            early, link.early = link.early, []
            woken: list[Waiter] = []
            with link.reading:
                self._handle(link, early, woken)

            self.after(woken)

        if self.links:
            self._reading.start()

    def ranks_at(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, home in enumerate(self.homes) if home == node]

    def is_near(self, rank: int) -> bool:
        """Whether a rank is one of this process."""
        return self.homes[rank] == self.index

    def look_longer(self, seconds: float) -> None:
        """Whoever waits looks for so long before it sleeps, if there are cores enough for that."""
        if len(os.sched_getaffinity(0)) >= CORES * (1 + len(self.links)):
            self._watch.looking = seconds

    # Talking. Under the mutex; what is queued leaves with the next :meth:`after`.

    def tell(self, node: int, frame: bytes, *, fd: int | None = None, lazily: bool = False) -> None:
        """Queue a message for one other node. ``lazily``: it may wait for the next one to the same node."""
        link = self.links.get(node)
        if link is not None:
            self._queue(link, frame, fd, lazily)

    def tell_all(self, frame: bytes, *, fd: int | None = None, lazily: bool = False) -> None:
        """Queue a message for every other node."""
        for link in self.links.values():
            self._queue(link, frame, fd, lazily)

    def _queue(self, link: Link, frame: bytes, fd: int | None, lazily: bool) -> None:
        if self.owes is not None:
            owes, self.owes = self.owes, None
            owes()

        if not link.lost:
            link.queue(frame, fd)
            if not lazily:
                link.due = self._due = True

    def send(self) -> None:
        """Send what is queued, and do nothing else: whoever holds a lock, or is at a piece of work, may call it."""
        while self._due:
            self._due = False
            try:
                for link in self.links.values():
                    if link.due:
                        link.due = False
                        try:
                            if not link.flush():
                                self._watch.await_room(link)
                        except BaseException:
                            link.due = True
                            raise
            except BaseException:  # Ctrl-C: what is left leaves with what is sent next
                self._due = True
                raise

    def after(self, woken: Collection[Waiter] = ()) -> None:
        """Send what is queued, wake settled waiters, and do what jobs there are. Outside all locks."""
        try:
            if self._due:
                self.send()

            self.trash.clear()  # before those wake who can see it
            if woken:
                self._wake(woken)
        except BaseException:  # Ctrl-C: nobody else will wake them, and who is awake is not woken again
            self._wake(woken)
            self.send()
            raise

        if self.jobs and not self._here.busy:
            self.jobs.work_off()

    def _wake(self, woken: Iterable[Waiter]) -> None:
        for waiter in woken:
            if isinstance(waiter, Notice):
                self.jobs.append(Again(waiter.call))  # after the threads: a callback may take its time
            else:
                self._reading.wake(waiter)

    # Waiting

    def wait(self, waiter: Waiter, deadline: float) -> bool:
        """Block until the waiter is settled; false at the deadline, which may be over already: then this only looks."""
        if self._here.busy:  # somebody's callback waits: for what other jobs do, maybe
            self._here.busy = False
            try:
                self.after()
                return self.wait(waiter, deadline)
            finally:
                self._here.busy = True

        return self._reading.wait(waiter, deadline)

    def _hear(self, seconds: float | None) -> None:
        """Wait for messages once, and handle what has come. Jobs are done after that: see :meth:`_heard`."""
        self._here.busy = True
        for source, reads, room in self._watch.wait(seconds):
            if isinstance(source, int):
                self._ended(source)
                continue

            if room and source.flush():
                self._watch.has_room(source)

            if reads:
                self._take(source)

    def _heard(self) -> None:
        """Another thread may read now: a job may wait for what is read then."""
        self._here.busy = False
        if self.jobs:
            self.jobs.work_off()

    def look(self) -> None:
        """Handle what has arrived by now, whoever reads; waits for nothing."""
        try:
            for link in self.links.values():
                if not link.lost:
                    self._take(link)
        except BaseException:  # Ctrl-C: what has been heard may have left a job that somebody waits for
            self.after()
            raise

    def look_for(self, come: Callable[[], bool]) -> bool:
        """Handle what arrives in the next moment, if answers have come soon of late; whether ``come`` holds then."""
        for _ in self._watch.moment():
            self.look()
            if come():
                return True

        return False

    def look_first(self, come: Callable[[], bool], seconds: float) -> None:
        """As :meth:`look_for`, before a :meth:`wait` of so many seconds: it costs more than most answers take.

        Not where a process has several ranks: they would all look, and keep the GIL from the one that is under way.
        """
        if len(self.own_ranks) > 1:
            return

        for _ in self._watch.moment(seconds):
            self.look()
            if come():
                self._reading.looked()
                break

    def _take(self, link: Link) -> bool | None:
        """Handle some of what has come; false at the end of the stream, None if nothing has."""
        woken: list[Waiter] = []
        try:
            with link.reading:
                came = link.pull()
                if link.unhandled:
                    self._handle(link, link.messages(), woken)
        except BaseException:  # Ctrl-C: what is here is handled all the same, and what was begun is lost
            with link.reading:
                self._handle(link, link.messages(), woken)

            self.after(woken)
            raise

        if came:
            self.after(woken)
        elif came is False:
            self._lose(link.peer, "its process ended without a goodbye")

        return came

    def _handle(self, link: Link, messages: Iterable[Message], woken: list[Waiter]) -> None:
        """Handle messages, and add the waiters that they settle. The link's reading lock is held: so they are handled
        in their order.
        """
        with self.mutex:
            if link.handling is not None:
                said = rank_list(self.ranks_at(link.peer))
                woken += self.on_torn(f"it took in what {said} had said ({link.handling.kind})")
                link.handling = None

            for link.handling in messages:  # one is taken and noted without a call: see link.py
                woken += self.handlers[link.handling.kind](link.peer, link.handling)
                link.handling = None

            link.unhandled = False

    # Death

    def _ended(self, node: int) -> None:
        link = self.links[node]
        while self._take(link):
            pass

        self._lose(node, "its process ended without a goodbye")
        self.on_dead(node)

    def _lose(self, node: int, reason: str) -> None:
        """The process is gone. If its ranks have said goodbye that is all there is to it."""
        link = self.links[node]
        with self.mutex:
            if node in self.gone:
                return

            self.gone.add(node)
            link.lost = True
            self._watch.remove_link(link)
            missed = [rank for rank in self.ranks_at(node) if rank not in self.presence.closed]
            if missed:
                self._killed.add(node)

            for rank in missed:
                self.presence.die(rank, reason)

            woken = list(self.on_gone(node)) + (list(self.on_lost()) if missed else [])

        self.after(woken)

    # The end

    def close(self) -> None:
        """Every rank of this process has said goodbye: send the last words, and let everything go."""
        with self.mutex:
            busy = self._reading.close()

        if self._reading.here:  # a callback of ours closes it: what it returns to still needs the descriptors
            threading.Thread(target=self._finish, args=(True,), name=f"{self.presence.label} closes").start()
        else:
            self._finish(busy)

    def _finish(self, busy: bool) -> None:
        self._reading.await_end(LINGER, busy=busy)
        deadline = time.monotonic() + LINGER
        for link in self.links.values():
            while not link.flush(patience=deadline - time.monotonic()) and time.monotonic() < deadline:
                ready([link.socket.fileno()], deadline - time.monotonic(), select.POLLOUT)

            link.close()

        self._await_dead(deadline)
        self._watch.close()
        self.on_end()

    def _await_dead(self, deadline: float) -> None:
        """A killed process is gone in a moment, and with it the lock by which others know that it lives."""
        pids = {node: self.presence.pids[self.ranks_at(node)[0]] for node in self._killed}
        # One that gave up opening it has closed its connections, and lives.
        self._watch.await_ends([node for node, pid in pids.items() if not is_alive(pid)], deadline)

    def forget_fork(self) -> None:
        """In a forked child: this node is the parent's. Its connections must end when the parent does."""
        self.forked = True
        self.mutex = self.presence.mutex = threading.Lock()  # another thread of the parent may have had it
        for link in self.links.values():
            link.close(0.0)  # nor is there anybody who would let go of its locks

        self._watch.forget_fork()
