"""One node's part of joint work, being done: it goes on, halts for the others, breaks, ends.

One thread at a time is at a call, see :attr:`Call.running`: one that waits for it, or whoever does the node's jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident

import torch

from dtorch_core import AbortedError, CollectiveMismatchError, DtorchError
from dtorch_core._text import describe_error, interruption, rank_list
from dtorch_core.joint import let_go
from dtorch_file_store.calls import QUEUED, Call
from dtorch_file_store.gpu_parts import GpuParts
from dtorch_file_store.jobs import Again
from dtorch_file_store.node import Node
from dtorch_file_store.parts import Parts
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import frame

_inference = getattr(torch._C, "_InferenceMode", torch.inference_mode)
"""Tensors made in inference mode can be written in it alone, others in it too; and it records no gradients. Without
torch's wrapper, which costs as much as a small copy. A new one each time: a part that sends may do another call's part.
"""


class Progress:
    """How the calls of one opening go on here. What returns waiters has settled them."""

    def __init__(
        self, node: Node, parts: Parts, gpu: GpuParts, calls: dict[str, Call], give_up: Callable[[], list[Waiter]]
    ) -> None:
        """
        :param calls: those that have not ended, by key.
        :param give_up: fails what can't end well any more; called under the mutex where a part halts.
        """
        self._node, self._presence = node, node.presence
        self._parts, self._gpu, self._calls, self.give_up = parts, gpu, calls, give_up

    def may_go_on(self, call: Call) -> bool:
        """All have come, no thread is at it, and the others are as far as it needs. Under the mutex."""
        return call.complete and not call.running and not call.finished and not call.halted(call.awaits)

    def moved(self, call: Call) -> Iterable[Waiter]:
        """It may go on: wake a thread that waits for it, or have the one that reads do it. Under the mutex."""
        if not self.may_go_on(call):
            return ()

        if call.waiters:
            waiter = call.waiters[-1]
            waiter.done = True
            del call.waiters[-1]
            return (waiter,)

        self._queue(call)
        return ()

    def do(self, call: Call) -> None:
        """Go on; ``running`` is this thread already."""
        node = self._node
        if node.jobs.busy:
            with node.mutex:
                self._queue(call)
        else:
            node.jobs.do(partial(self._go_on, call))

    def _queue(self, call: Call) -> None:
        """Under the mutex. If it is interrupted amid this, the job will find nothing to do."""
        self._node.jobs.append(Again(self._go_on, call, True))
        call.running = QUEUED

    def _go_on(self, call: Call, queued: bool = False) -> None:
        """Do this node's part, as far as it goes now; ``running`` is this thread, or it is queued."""
        woken: list[Waiter] = []
        runs = True
        try:
            if queued:
                with self._node.mutex:
                    if call.running != QUEUED:  # a thread that waits for it has come by first
                        return

                    call.running = get_ident()

            while runs:
                error: BaseException | None = None
                interrupt: BaseException | None = None
                try:
                    with _inference(True):
                        if call.steps is None:
                            call.steps = self._parts.of(call)

                        awaits = next(call.steps, None)
                except BaseException as failure:  # reaches this node's ranks through their tickets
                    awaits, error = None, failure
                    if not isinstance(failure, Exception):  # Ctrl-C: the thread's alone, and the others are told of it
                        what = interruption(self._node.own_ranks[0], call.key, failure)
                        interrupt, error = failure, AbortedError(f"{self._presence.label}: {what}")

                    self._break(call, error)
                    let_go(error)

                with self._node.mutex:
                    runs = False  # and not asked of the call below: another thread may be at it by then
                    if awaits is None:
                        woken = self.end(call, error)
                    elif call.broken is not None and call.halted(awaits):
                        woken = self.end(call, call.broken)
                    elif call.halted(awaits):
                        call.awaits, call.running = awaits, 0
                        woken = self.give_up()
                    else:
                        call.awaits, runs = awaits, True

                self._node.after(woken)
                if interrupt is not None:
                    raise interrupt
        except BaseException:  # Ctrl-C between those lines
            with self._node.mutex:
                woken = woken + self.left(call)

            self._node.after(woken)
            raise

    def interrupted(self, call: Call, waiter: Waiter | None) -> None:
        """This thread neither waits for it nor works at it any more."""
        with self._node.mutex:
            woken = self.left(call)
            if waiter is None or waiter.done:  # it was to go on
                woken += self.moved(call)
            elif waiter in call.waiters:
                call.waiters.remove(waiter)

        self._node.after(woken)

    def left(self, call: Call) -> list[Waiter]:
        """If an interrupt has taken this thread out of its work at a call, that can't go well. Under the mutex."""
        if call.running != get_ident() or call.finished:
            return []

        if call.steps is None:  # nothing is done yet
            call.running = 0
            return list(self.moved(call))

        error = AbortedError(f"{self._presence.label}: rank {self._node.own_ranks[0]} was interrupted in {call.key}")
        self._node.tell_all(frame("broken", call.key, type(error).__name__, str(error)))
        return self.end(call, error)

    def _break(self, call: Call, error: BaseException) -> None:
        """This node can't do its part: those that wait for it learn why. What all find wrong they find themselves."""
        if isinstance(error, CollectiveMismatchError):
            kind, text = type(error).__name__, str(error)
        else:
            kind = type(error).__name__ if isinstance(error, DtorchError) else DtorchError.__name__
            ranks = rank_list(self._node.own_ranks)
            text = f"{self._presence.label}, {call.key}: {ranks} could not do its part: {describe_error(error)}"

        with self._node.mutex:
            self._node.tell_all(frame("broken", call.key, kind, text))

        self._node.send()

    def end(self, call: Call, error: BaseException | None) -> list[Waiter]:
        """Under the mutex. May be done again where it was interrupted: what says that it is over comes last."""
        call.error = call.error or error
        self._calls.pop(call.key, None)
        self._parts.ended(call)
        self._node.trash.append((call.offers, call.steps))
        for waiter in call.waiters:
            waiter.done = True

        woken = call.waiters + call.notices  # after the threads: a callback may take its time
        call.waiters, call.notices, call.offers, call.steps = [], [], [], None
        call.finished, call.running = True, 0
        if call.dropped:
            self._gpu.abandon(call)

        return woken
