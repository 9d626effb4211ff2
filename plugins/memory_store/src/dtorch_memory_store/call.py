"""One piece of joint work on shared memory: who has brought what, who is at it, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtorch_core.joint import Offer, Task
from dtorch_memory_store.on_gpu import Queued, Ready
from dtorch_memory_store.waiting import Owed, Waiter

LINE = "\n"
"""A note's first line says what the work is; the rest is data."""

STARTER = 0
"""In place of a thread's identifier, which is never 0: the thread of the last to come."""

NOBODY: dict[int, bool] = {}
"""Shared by all calls without tasks: not to be written to."""


class Call:
    """One piece of joint work, shared by its ranks."""

    __slots__ = (
        "came",
        "error",
        "finished",
        "inside",
        "key",
        "left",
        "next_task",
        "notes",
        "notices",
        "offers",
        "queued",
        "ready",
        "running",
        "tasks",
        "waiters",
    )

    def __init__(self, key: str, world_size: int) -> None:
        self.key = key
        self.offers: list[Offer | None] = [None] * world_size
        self.notes = [""] * world_size
        self.ready: list[Ready] = []
        """Of offers of CUDA tensors, as they come."""
        self.came = 0
        self.waiters: list[Waiter] = []
        self.notices: list[Waiter] = []
        """Told at the end only, while waiters are also woken to help."""
        self.tasks: Sequence[Task] = ()
        self.next_task: Iterator[int]
        """Where there are tasks."""
        self.running = False
        """There are tasks, which ranks that wait may take."""
        self.inside = NOBODY
        """The threads that took to them, and whether they are at them still: :data:`STARTER`, and identifiers."""
        self.finished = False
        self.left: tuple[int, BaseException] | None = None
        """The rank that has left it amid its share of the work, as by Ctrl-C, and what it was interrupted by."""
        self.error: BaseException | None = None
        self.queued: Queued | None = None
        """Where it is queued, if it is work for a GPU."""

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank, offer in enumerate(self.offers) if offer is None]

    def what(self, rank: int) -> str:
        """How messages to ``rank``, which has come, call it."""
        offer = self.offers[rank]
        return f"{self.key}, {offer.note.partition(LINE)[0]}" if offer is not None else self.key

    def all_done(self, owed: Owed) -> list[Waiter]:
        """Those that sleep on it have what they wait for: whom to wake. Under the mutex."""
        woken = self.waiters
        for waiter in woken:
            waiter.done = True
            owed[waiter] = None

        self.waiters = []
        return woken
