"""Joint work on shared memory: the last rank to come starts it, ranks that wait help, nobody else is woken.

A small piece of work costs one hand-off: the ranks before the last sleep, the last does the work and wakes them. A
large one comes as tasks: the sleepers are woken to take their share, and the rank that ends the last task wakes those
that ran out of tasks before it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from dtorch_core import AbortedError, ProtocolError, StoreTimeoutError, streams
from dtorch_core._text import rank_list, seconds
from dtorch_core.joint import Offer, Task, Ticket, Work, copy_of
from dtorch_memory_store.presence import Presence
from dtorch_memory_store.waiting import Failure, Waiter, raise_if, settle, wake

LINE = "\n"
"""A note's first line says what the work is; the rest is data."""


class Call:
    """One piece of joint work, shared by its ranks."""

    __slots__ = (
        "callbacks",
        "came",
        "done_event",
        "error",
        "events",
        "finished",
        "key",
        "next_task",
        "notes",
        "offers",
        "running",
        "tasks",
        "unfinished",
        "waiters",
    )

    def __init__(self, key: str, world_size: int) -> None:
        self.key = key
        self.offers: list[Offer | None] = [None] * world_size
        self.notes: Sequence[str] = ()
        self.events: list[tuple[torch.cuda.Event, Tensor]] = []
        self.came = 0
        self.waiters: list[Waiter] = []
        self.callbacks: list[Callable[[], None]] = []
        self.tasks: Sequence[Task] = ()
        self.next_task = itertools.count()
        self.unfinished = 0
        self.running = False
        self.finished = False
        self.error: BaseException | None = None
        self.done_event: torch.cuda.Event | None = None

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank, offer in enumerate(self.offers) if offer is None]


class Joint:
    """The joint work of one opening's ranks."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self._calls: dict[str, Call] = {}
        self._retired: str | None = None

    def post(self, key: str, offer: Offer, work: Work, stream: torch.cuda.Stream | None) -> MemoryTicket:
        """Bring an offer; the last to come does the work. Never waits for another rank."""
        rank = offer.rank
        event = streams.record(offer.tensors[0], stream) if offer.tensors else None
        with self.presence.mutex:
            self.presence.check_open(rank)
            if self._retired is not None:
                raise AbortedError(f"{self.presence.me(rank)}, {key}: {self._retired}")

            raise_if(self.presence.over(rank, key))
            call = self._calls.get(key)
            if call is None:
                call = self._calls[key] = Call(key, self.presence.world_size)

            if call.offers[rank] is not None:
                raise ProtocolError(f"{self.presence.at(key)}: rank {rank} has brought its part already")

            call.offers[rank] = offer
            call.came += 1
            if event is not None:
                call.events.append((event, offer.tensors[0]))

            last = call.came == self.presence.world_size
            if last:
                del self._calls[key]

        if last:
            self._start(call, work, stream)

        return MemoryTicket(self, call, rank)

    def wait_for(self, call: Call, rank: int, timeout: float) -> None:
        """Sleep until the call is finished, taking tasks where there are any."""
        deadline = time.monotonic() + timeout
        helped = False
        while True:
            if call.running and not helped:
                self._help(call)
                helped = True

            with self.presence.mutex:
                if call.finished:
                    break

                if call.running and not helped:
                    continue

                started = call.came == self.presence.world_size
                waiter = Waiter(rank)
                if not started:
                    raise_if(self._why_not_done(call, waiter))

                call.waiters.append(waiter)

            # Once all have come the work ends by itself; leaving it would leave this rank's tensors to its writes.
            waiter.sleep(threading.TIMEOUT_MAX if started else deadline - time.monotonic())
            with self.presence.mutex:
                if not waiter.settled:
                    call.waiters.remove(waiter)
                    if call.came < self.presence.world_size:
                        raise self._give_up(call, rank, timeout)

                raise_if(waiter.error)

        if call.error is not None:
            raise copy_of(call.error)

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more: the waiters to wake. Under the mutex."""
        failed = []
        for call in self._calls.values():
            failed += settle(call.waiters, partial(self._why_not_done, call))
            call.waiters = [waiter for waiter in call.waiters if not waiter.settled]

        return failed

    def _why_not_done(self, call: Call, waiter: Waiter) -> Failure | None:
        return self.presence.lacks(waiter.rank, call.missing(), call.key)

    def _start(self, call: Call, work: Work, stream: torch.cuda.Stream | None) -> None:
        offers = [offer for offer in call.offers if offer is not None]
        call.notes = [offer.note for offer in offers]
        tasks: Sequence[Task] = ()
        try:
            if call.events:
                tasks = self._on_stream(call, offers, work, stream)
            else:
                tasks = work(offers)
                if len(tasks) == 1:  # nothing to share: waking helpers would only cost
                    tasks[0]()
                    tasks = ()
        except BaseException as error:  # reaches every rank, this one too, through its ticket
            call.error = error

        if not tasks:
            self._finish(call)
            return

        with self.presence.mutex:
            call.tasks, call.unfinished, call.running = tasks, len(tasks), True
            woken = _all_done(call)

        wake(woken)
        self._help(call)

    def _on_stream(
        self, call: Call, offers: list[Offer], work: Work, stream: torch.cuda.Stream | None
    ) -> Sequence[Task]:
        """Queue the work behind all that the ranks' streams have queued. Its tasks only queue work too."""
        _, tensor = call.events[0]
        queue = stream if stream is not None else torch.cuda.current_stream(tensor.device)
        for event, _ in call.events:
            queue.wait_event(event)

        # The current stream is entered by nobody: entering costs as much as a kernel launch.
        with torch.cuda.stream(queue) if stream is not None else nullcontext():
            for task in work(offers):
                task()

        for offer in offers:
            for tensor in offer.tensors:
                streams.keep_until_done(tensor, queue)

        call.done_event = torch.cuda.Event()
        call.done_event.record(queue)
        return ()

    def _help(self, call: Call) -> None:
        done = 0
        while (number := next(call.next_task)) < len(call.tasks):
            try:
                if call.error is None:
                    call.tasks[number]()
            except BaseException as error:
                call.error = error

            done += 1

        with self.presence.mutex:
            call.unfinished -= done
            over = done and not call.unfinished

        if over:
            self._finish(call)

    def _finish(self, call: Call) -> None:
        with self.presence.mutex:
            call.finished = True
            # Views and closures over every rank's tensors: let them go with the work.
            call.tasks, call.offers = (), []
            woken = _all_done(call)
            callbacks, call.callbacks = call.callbacks, []

        wake(woken)
        for callback in callbacks:
            callback()

    def _give_up(self, call: Call, rank: int, timeout: float) -> Exception:
        missing, offer = rank_list(call.missing()), call.offers[rank]
        what = f"{call.key}, {offer.note.partition(LINE)[0]}" if offer is not None else call.key
        late = f"{missing} had not come after {seconds(timeout)}"
        if self._retired is None:
            self._retired = f"rank {rank} gave up on {what}: {late}"

        return StoreTimeoutError(f"{self.presence.me(rank)}, {what}: {late}")


def _all_done(call: Call) -> list[Waiter]:
    woken, call.waiters = call.waiters, []
    for waiter in woken:
        waiter.done = True

    return woken


class MemoryTicket(Ticket):
    """One rank's share in a call."""

    __slots__ = ("_call", "_joint", "_rank")

    def __init__(self, joint: Joint, call: Call, rank: int) -> None:
        self._joint = joint
        self._call = call
        self._rank = rank

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        call = self._call
        if not call.finished or call.error is not None:
            self._joint.wait_for(call, self._rank, timeout)

        if call.done_event is not None:
            queue = stream if stream is not None else torch.cuda.current_stream(call.done_event.device)
            queue.wait_event(call.done_event)

    def notes(self) -> Sequence[str]:
        return self._call.notes

    def done(self) -> bool:
        return self._call.finished

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._joint.presence.mutex:
            if not self._call.finished:
                self._call.callbacks.append(callback)
                return

        callback()
