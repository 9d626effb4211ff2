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

import torch

from dtorch_core import AbortedError, ProtocolError, StoreTimeoutError
from dtorch_core._text import interruption, rank_list, seconds
from dtorch_core.joint import Offer, Task, Ticket, Work, copy_of, let_go
from dtorch_core.presence import Failure, Presence, raise_if, settle
from dtorch_memory_store.on_gpu import Queued, Ready
from dtorch_memory_store.waiting import Notice, Waiter, wake

LINE = "\n"
"""A note's first line says what the work is; the rest is data."""


class Call:
    """One piece of joint work, shared by its ranks."""

    __slots__ = (
        "came",
        "error",
        "finished",
        "key",
        "next_task",
        "notes",
        "notices",
        "offers",
        "queued",
        "ready",
        "running",
        "tasks",
        "unfinished",
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
        self.next_task = itertools.count()
        self.unfinished = 0
        self.running = False
        self.finished = False
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


class Joint:
    """The joint work of one opening's ranks."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self._calls: dict[str, Call] = {}
        self._retired: str | None = None

    def post(self, key: str, offer: Offer, work: Work, stream: torch.cuda.Stream | None) -> MemoryTicket:
        """Bring an offer; the last to come does the work. Never waits for another rank."""
        rank, presence = offer.rank, self.presence
        ready = Ready.of(offer, stream) if offer.tensors and offer.tensors[0].is_cuda else None
        with presence.mutex:
            if not presence.complete or self._retired is not None:
                presence.check_open(rank)
                raise_if(self.over(rank, key))

            call = self._calls.get(key)
            if call is None:
                call = self._calls[key] = Call(key, presence.world_size)

            if call.offers[rank] is not None:
                raise ProtocolError(f"{presence.at(key)}: rank {rank} has brought its part already")

            call.offers[rank] = offer
            call.notes[rank] = offer.note
            call.came += 1
            if ready is not None:
                call.ready.append(ready)

            last = call.came == presence.world_size
            if last:
                del self._calls[key]

        if last:
            interrupt = self._start(call, rank, work, stream)
            if interrupt is not None:
                raise interrupt

        return MemoryTicket(self, call, rank, None if ready is None else ready.device)

    def wait_for(self, call: Call, rank: int, timeout: float) -> None:
        """Sleep until the call is finished, taking tasks where there are any."""
        deadline = time.monotonic() + timeout
        helped = False
        while not call.finished:
            if call.running and not helped:
                helped = True
                interrupt = self._help(call, rank)
                if interrupt is not None:
                    raise interrupt

            with self.presence.mutex:
                if call.finished:
                    break

                if call.running and not helped:
                    continue

                started = call.came == self.presence.world_size
                if not self.presence.complete or self._retired is not None:
                    raise_if(self._hopeless(call, rank))

                waiter = Waiter(rank)
                call.waiters.append(waiter)

            # Once all have come the work ends by itself; leaving it would leave this rank's tensors to its writes.
            waiter.sleep(threading.TIMEOUT_MAX if started else deadline - time.monotonic())
            if waiter.done:  # written before the thread was woken
                continue

            woken: list[Waiter] = []
            with self.presence.mutex:
                if not waiter.settled:
                    call.waiters.remove(waiter)
                    if call.came < self.presence.world_size:
                        waiter.error, woken = self._retire(call, rank, timeout)

            wake(woken)
            raise_if(waiter.error)

        if call.error is not None:
            raise copy_of(call.error)

    def done(self, call: Call, rank: int) -> bool:
        """It is finished, or never will be."""
        if call.finished:
            return True

        with self.presence.mutex:
            return call.finished or self._hopeless(call, rank) is not None

    def notify(self, call: Call, rank: int, callback: Callable[[], None]) -> None:
        """Call back when it is done; at once if it is."""
        with self.presence.mutex:
            if not call.finished and self._hopeless(call, rank) is None:
                call.notices.append(Notice(rank, callback, self.presence))
                return

        callback()

    def over(self, rank: int, what: str) -> Failure | None:
        """Why nothing can be begun any more; None while it can. Under the mutex."""
        failure = self.presence.over(rank, what)
        if failure is None and self._retired is not None:
            reason = f"{self.presence.me(rank)}, {what}: {self._retired}"
            return lambda: AbortedError(reason)

        return failure

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more: the waiters to wake. Under the mutex."""
        failed = []
        for call in self._calls.values():
            # Those asleep have a deadline of their own, also when another rank has given up at its.
            failed += settle(call.waiters, lambda waiter, call=call: self._stuck(call, waiter.rank))  # type: ignore[misc]
            call.waiters = [waiter for waiter in call.waiters if not waiter.settled]
            failed += settle(call.notices, lambda notice, call=call: self._hopeless(call, notice.rank))  # type: ignore[misc]
            call.notices = [notice for notice in call.notices if not notice.settled]

        return failed

    def _stuck(self, call: Call, rank: int) -> Failure | None:
        """Why those who have not come can't come any more."""
        if call.came == self.presence.world_size:
            return None

        if rank in self.presence.closed:
            reason = f"{self.presence.me(rank)}, {call.what(rank)}: it was closed"
            return lambda: AbortedError(reason)

        return self.presence.lacks(rank, call.missing(), call.what(rank))

    def _hopeless(self, call: Call, rank: int) -> Failure | None:
        """Why ``rank`` need not begin to wait for it."""
        if call.came == self.presence.world_size:
            return None

        return self._stuck(call, rank) or self.over(rank, call.what(rank))

    def _start(self, call: Call, rank: int, work: Work, stream: torch.cuda.Stream | None) -> BaseException | None:
        """Do the work, with the help of others. What has interrupted this thread meanwhile, and is its own to raise."""
        interrupt: BaseException | None = None
        offers: list[Offer] = call.offers  # type: ignore[assignment]  # all have come
        tasks: Sequence[Task] = ()
        try:
            if call.ready:
                call.queued = Queued(call.ready, stream)
                call.queued.run(call.ready, offers, work, stream)
            else:
                tasks = work(offers)
                if len(tasks) == 1:  # nothing to share: waking helpers would only cost
                    tasks[0]()
                    tasks = ()
        except BaseException as error:  # reaches every rank, this one too, through its ticket
            interrupt = self._failed(call, rank, error)
            tasks = ()

        if not tasks:
            self._finish(call)
            return interrupt

        with self.presence.mutex:
            call.tasks, call.unfinished, call.running = tasks, len(tasks), True
            woken = _all_done(call)

        wake(woken)
        interrupt = self._help(call, rank)
        self._await_helpers(call, rank)
        return interrupt

    def _help(self, call: Call, rank: int) -> BaseException | None:
        """Take tasks while there are any. What has interrupted this thread meanwhile."""
        interrupt: BaseException | None = None
        done = 0
        while (number := next(call.next_task)) < len(call.tasks):
            try:
                if call.error is None:
                    call.tasks[number]()
            except BaseException as error:
                interrupt = self._failed(call, rank, error) or interrupt

            done += 1

        with self.presence.mutex:
            call.unfinished -= done
            over = done and not call.unfinished

        if over:
            self._finish(call)

        return interrupt

    def _failed(self, call: Call, rank: int, error: BaseException) -> BaseException | None:
        """The work raised ``error`` in ``rank``'s thread. Returns it if it is this thread's alone, as of Ctrl-C: the
        others are told of it."""
        if isinstance(error, Exception):
            let_go(error)
            call.error = error
            return None

        what = interruption(rank, call.what(rank), error)
        call.error = AbortedError(f"{self.presence.label}: {what}")
        return error

    def _finish(self, call: Call) -> None:
        with self.presence.mutex:
            call.finished = True
            # Views and closures over every rank's tensors: let them go with the work, but not under the mutex.
            used = call.tasks, call.offers, call.ready
            call.tasks, call.offers, call.ready = (), [], []
            woken = _all_done(call)
            if call.notices:
                woken += call.notices  # after the threads: a callback may take its time
                call.notices = []

        del used
        wake(woken)

    def _await_helpers(self, call: Call, rank: int) -> None:
        """Until the other ranks have ended the task that each is at: the next work may write to the same tensors."""
        with self.presence.mutex:
            if call.finished:
                return

            waiter = Waiter(rank)
            call.waiters.append(waiter)

        try:
            waiter.sleep(threading.TIMEOUT_MAX)
        except BaseException:  # Ctrl-C: they are at its tensors
            waiter.sleep(threading.TIMEOUT_MAX)
            raise

    def _retire(self, call: Call, rank: int, timeout: float) -> tuple[Failure, list[Waiter]]:
        """A rank gives up: nothing can be begun any more. Its error, and whom to wake. Under the mutex."""
        what = call.what(rank)
        late = f"{rank_list(call.missing())} had not come after {seconds(timeout)}"
        if self._retired is None:
            self._retired = f"rank {rank} gave up on {what}: {late}"

        text = f"{self.presence.me(rank)}, {what}: {late}"
        return lambda: StoreTimeoutError(text), self.give_up()


def _all_done(call: Call) -> list[Waiter]:
    woken, call.waiters = call.waiters, []
    for waiter in woken:
        waiter.done = True

    return woken


class MemoryTicket(Ticket):
    """One rank's share in a call."""

    __slots__ = ("_call", "_gpu", "_joint", "_rank")

    def __init__(self, joint: Joint, call: Call, rank: int, gpu: int | None) -> None:
        """
        :param gpu: the one that the rank's tensors are on; None if it has brought none.
        """
        self._joint = joint
        self._call = call
        self._rank = rank
        self._gpu = gpu

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        call = self._call
        if not call.finished or call.error is not None:
            self._joint.wait_for(call, self._rank, timeout)

        if call.queued is not None:
            call.queued.order(self._gpu, stream)

    def notes(self) -> Sequence[str]:
        return self._call.notes

    def done(self) -> bool:
        return self._joint.done(self._call, self._rank)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._joint.notify(self._call, self._rank, callback)
