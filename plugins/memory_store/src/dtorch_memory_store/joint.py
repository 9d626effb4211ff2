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
from dtorch_core.presence import Failure, Presence, raise_if
from dtorch_memory_store.call import STARTER, Call
from dtorch_memory_store.on_gpu import Queued, Ready
from dtorch_memory_store.waiting import Notice, Owed, Waiter, fail, wake, wake_all


class Joint:
    """The joint work of one opening's ranks."""

    def __init__(self, presence: Presence, owed: Owed) -> None:
        self.presence = presence
        self._owed = owed
        self._calls: dict[str, Call] = {}
        """Those that not all have come to."""
        self._due: dict[Call, None] = {}
        """Those that all have come to, until they are finished, and everybody owed a wake-up."""
        self._retired: str | None = None

    def post(self, key: str, offer: Offer, work: Work, stream: torch.cuda.Stream | None) -> MemoryTicket:
        """Bring an offer; the last to come does the work. Never waits for another rank."""
        rank, presence = offer.rank, self.presence
        ready = Ready.of(offer, stream) if offer.tensors and offer.tensors[0].is_cuda else None
        due: Call | None = None
        try:
            with presence.mutex:
                if not presence.complete or self._retired is not None:
                    presence.check_open(rank)
                    raise_if(self.over(rank, key))

                call = self._calls.get(key)
                if call is None:
                    call = self._calls[key] = Call(key, presence.world_size)

                if call.offers[rank] is not None:
                    raise ProtocolError(f"{presence.at(key)}: rank {rank} has brought its part already")

                if ready is not None:
                    call.ready.append(ready)

                # One step, to a signal: it has come, and to the last one the call belongs.
                call.offers[rank] = offer
                call.notes[rank] = offer.note
                call.came += 1
                if call.came == presence.world_size:
                    due = call
                    self._due[call] = None
                    del self._calls[key]

            if due is not None:
                self._start(call, rank, work, stream)

            return MemoryTicket(self, call, rank, None if ready is None else ready.device)
        except BaseException as error:  # Ctrl-C: the others wait for this thread
            if due is not None:
                if not due.finished:
                    due.left = rank, error
                    if due.running:
                        due.inside[STARTER] = False

                self.mend()
                self._await_helpers(due, rank)

            raise

    def wait_for(self, call: Call, rank: int, timeout: float) -> None:
        """Sleep until the call is finished, taking tasks where there are any."""
        deadline = time.monotonic() + timeout
        helper = STARTER  # until this thread helps
        try:
            while not call.finished:
                with self.presence.mutex:
                    if call.finished:
                        break

                    helps = call.running and helper == STARTER
                    if helps:
                        helper = threading.get_ident()
                        call.inside[helper] = True
                    else:
                        started = call.came == self.presence.world_size
                        if not self.presence.complete or self._retired is not None:
                            raise_if(self._hopeless(call, rank))

                        waiter = Waiter(rank)
                        call.waiters.append(waiter)

                if helps:
                    self._help(call, helper)
                    continue

                # Once all have come the work ends by itself; leaving it would leave this rank's tensors to its writes.
                waiter.sleep(threading.TIMEOUT_MAX if started else deadline - time.monotonic())
                if waiter.done:  # written before the thread was woken
                    continue

                with self.presence.mutex:
                    if not waiter.settled:
                        call.waiters.remove(waiter)
                        if call.came < self.presence.world_size:
                            waiter.error = self._retire(call, rank, timeout)

                raise_if(waiter.error)
        except BaseException as error:
            if helper != STARTER and call.inside[helper]:  # Ctrl-C: the others wait for this thread
                call.left = rank, error
                call.inside[helper] = False

            self.mend()
            raise

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
                call.notices.append(Notice(rank, callback, self.presence, self._owed))
                return

        callback()

    def over(self, rank: int, what: str) -> Failure | None:
        """Why nothing can be begun any more; None while it can. Under the mutex."""
        failure = self.presence.over(rank, what)
        if failure is None and self._retired is not None:
            reason = f"{self.presence.me(rank)}, {what}: {self._retired}"
            return lambda: AbortedError(reason)

        return failure

    def give_up(self) -> None:
        """Fail the waits that can't end well any more. Under the mutex."""
        for call in self._calls.values():
            # Those asleep have a deadline of their own, also when another rank has given up at its.
            fail(call.waiters, lambda waiter, call=call: self._stuck(call, waiter.rank), self._owed)  # type: ignore[misc]
            call.waiters = [waiter for waiter in call.waiters if not waiter.settled]
            fail(call.notices, lambda notice, call=call: self._hopeless(call, notice.rank), self._owed)  # type: ignore[misc]
            call.notices = [notice for notice in call.notices if not notice.settled]

    def mend(self) -> None:
        """End what interrupted threads have left, and wake whom they had to."""
        for call in list(self._due):
            if call.finished or call.running or call.left is not None:
                self._finish(call)

        wake_all(self._owed)

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

    def _start(self, call: Call, rank: int, work: Work, stream: torch.cuda.Stream | None) -> None:
        """Do the work, with the help of others."""
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
        except Exception as error:  # reaches every rank, this one too, through its ticket
            let_go(error)
            call.error = error
            tasks = ()

        if not tasks:
            self._finish(call)
            return

        numbers = itertools.count()
        with self.presence.mutex:
            # One step, to a signal.
            call.tasks, call.next_task, call.inside = tasks, numbers, {STARTER: True}
            call.running = True
            woken = call.all_done(self._owed)

        wake(woken, self._owed)
        self._help(call, STARTER)
        self._await_helpers(call, rank)

    def _help(self, call: Call, helper: int) -> None:
        """Take tasks while there are any; the last thread to find none ends the call."""
        try:
            while call.left is None and call.error is None and (number := next(call.next_task)) < len(call.tasks):
                call.tasks[number]()
        except Exception as error:
            let_go(error)
            call.error = error

        call.inside[helper] = False
        self._finish(call)

    def _finish(self, call: Call) -> None:
        """End it, unless somebody is at it still."""
        with self.presence.mutex:
            if call.inside and any(call.inside.values()):
                return

            if call.left is not None and not call.finished:
                rank, error = call.left
                call.error = AbortedError(f"{self.presence.label}: {interruption(rank, call.what(rank), error)}")
                call.left = None  # its frames hold the tensors

            call.finished = True
            # Views and closures over every rank's tensors: let them go with the work, but not under the mutex.
            used = call.tasks, call.offers, call.ready
            call.tasks, call.offers, call.ready = (), [], []
            woken = call.all_done(self._owed)
            if call.notices:
                # After the threads: a callback may take its time.
                for notice in call.notices:
                    self._owed[notice] = None

                woken += call.notices
                call.notices = []

            try:
                del self._due[call]
            except KeyError:  # somebody else has mended it too
                pass

        del used
        wake(woken, self._owed)

    def _await_helpers(self, call: Call, rank: int) -> None:
        """Until the other ranks have ended the task that each is at: the next work may write to the same tensors."""
        with self.presence.mutex:
            if call.finished:
                return

            waiter = Waiter(rank)
            call.waiters.append(waiter)

        waiter.sleep(threading.TIMEOUT_MAX)

    def _retire(self, call: Call, rank: int, timeout: float) -> Failure:
        """A rank gives up: nothing can be begun any more. Its error; others are owed one too. Under the mutex."""
        what = call.what(rank)
        late = f"{rank_list(call.missing())} had not come after {seconds(timeout)}"
        if self._retired is None:
            self._retired = f"rank {rank} gave up on {what}: {late}"

        self.give_up()
        text = f"{self.presence.me(rank)}, {what}: {late}"
        return lambda: StoreTimeoutError(text)


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
