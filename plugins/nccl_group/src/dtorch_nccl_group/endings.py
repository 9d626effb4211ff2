"""How one rank's part of a group ends: what the others say of it, which failure stays, and when NCCL's kernels end."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dtorch_core import (
    AbortedError,
    BackendContext,
    CollectiveMismatchError,
    DtorchError,
    PeerLostError,
    TensorStore,
)
from dtorch_core._goodbyes import say_elsewhere
from dtorch_core._groups.foreign_work import Over
from dtorch_nccl_group import traffic
from dtorch_nccl_group.calls import Calls
from dtorch_nccl_group.letters import TAG, Letters, Words

log = logging.getLogger("dtorch")

SETTLING = 0.2
"""Seconds in which kernels end whose every rank has come."""

Failure = Callable[[str], DtorchError]
"""Makes the error of a call that can't end well: a fresh one for each."""


class Endings(ABC):
    """The part of a companion that hears of the others. No lock is held while anything else is called."""

    def __init__(
        self,
        ctx: BackendContext,
        stores: tuple[TensorStore, TensorStore] | None,
        group: dist.ProcessGroup,
        backend: Any,  # noqa: ANN401
        finish: Callable[[], None] | None,
    ) -> None:
        """
        :param stores: over the same ranks: for texts and messages, and for letters; nothing is said over the first one
            any more when a rank has given up.
        :param group: beside which this stands. It is not kept.
        :param backend: torch's ProcessGroupNCCL, to be ended.
        :param finish: waits until all that was queued is over; None: a call is over when it was waited for.
        """
        self.talks = stores is not None
        self._stores: list[TensorStore] = list(stores or ())
        self._ctx, self._backend, self._finish = ctx, backend, finish
        self._queued = finish is not None
        self._serves_torch = False
        self._device = torch.device(ctx.device)
        self._lock = threading.Lock()
        self._calls = Calls(ctx.rank, ctx.world_size)
        self._last: tuple[str, Any] | None = None
        """The last collective that was begun, and its Work."""
        self._left: dict[int, int] = {}
        """Ranks that closed their handle, and how many collectives each had called by then."""
        self._refused: dict[int, tuple[int, str]] = {}
        """Collectives that another rank refused to begin, by number: who, and why."""
        self._own_refusals: set[int] = set()
        self._over: Failure | None = None
        self._is_over = threading.Event()
        self._told = False
        self._unsettled = False
        """Results were under way when it was over."""
        self._closed = False
        self._ended = False
        """Closed, and all that was begun is over."""
        self._failure: Exception | None = None
        """What close() raises."""
        self._ending: threading.Thread | None = None
        self._settled: dict[int, threading.Event] = {rank: threading.Event() for rank in range(ctx.world_size)}
        self._closing: int | None = None
        """The thread that closes it."""
        self._gone = threading.Event()
        """What close() does is done."""
        self._forgotten = weakref.finalize(group, say_elsewhere, self._forget, f"{ctx.name} is left")
        self._forgotten.atexit = False
        if traffic.is_shared(ctx):
            traffic.HERE.opened(self)

        if traffic.may_be_shared(ctx):
            traffic.HERE.keep(group, backend)

        self._letters = Letters(stores[1], self._on_letter, self._on_end) if stores is not None else None
        if self._letters is not None:
            self._letters.open()

    @abstractmethod
    def explain(self, call: str, error: Exception) -> Exception:
        """The error to raise where ``call`` raised ``error``."""

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        text = reason or f"rank {self._ctx.rank} aborted the group {self._ctx.name!r}"
        self._told = True
        self._end(lambda call: AbortedError(f"{self._label(call)}: {text}"))
        self._abort_backend()
        for store in reversed(self._stores):  # who is woken by the first one knows already
            store.abort(text, died=died)

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                self._closing = threading.get_ident()

        if closed:
            # What it works with may go when this returns: it can't be closed below somebody who is at it.
            if self._closing != threading.get_ident():
                self._gone.wait(self._ctx.timeout)

            return

        self._forgotten.detach()
        try:
            self._close()
        finally:
            self._gone.set()

    def _forget(self) -> None:
        """Nobody has the group any more: the others are told as if it had been closed."""
        try:
            self.close()
        except DtorchError as error:
            log.warning("%s, which was forgotten and not closed: %s", self._ctx.label, error)

    def _close(self) -> None:
        if self._over is None:
            self._settle()

        graceful, self._ended = self._over is None, True
        self._end(lambda call: AbortedError(f"{self._label(call)}: it is closed; open it anew"), abort=False)
        if graceful:
            self._end_backend()
        else:
            self._abort_backend()

        if self._ending is not None:
            self._ending.join(self._ctx.timeout)

        for store in self._stores:
            store.close()

        self._last = self._backend = None  # the process group alone keeps what is left of it
        if self._failure is not None:
            raise self._failure

        if not graceful and self._unsettled and not self._told:
            self._raise_over("close")

    def _settle(self) -> None:
        """What was begun comes to its end here, and on the ranks that read this one's memory."""
        if self._finish is not None:
            call, work = self._last or ("close", Over())
            try:
                work.outcome(self._device)
                self._finish()
            except Exception as error:
                self._failure = self.explain(call, error)
                return

        if self._letters is None or self._over is not None:
            return

        self._letters.send_all({"leaving": self._calls.number, "launched": self._calls.launched})
        deadline = time.monotonic() + self._ctx.timeout
        for rank in self._letters.others if self._queued else ():
            if rank not in self._left:
                self._settled[rank].wait(max(0.0, deadline - time.monotonic()))

    def _end(self, failure: Failure, *, abort: bool = True) -> None:
        """Nothing can be begun any more; the first failure stays."""
        last = self._last
        with self._lock:
            first = self._over is None
            if first:
                self._over = failure
                self._unsettled = self._queued and last is not None and last[1].is_under_way()

        if first:
            self._is_over.set()
            for event in self._settled.values():
                event.set()

            self._calls.end()

        if abort and not self._ended:
            self._abort_backend()

    def _end_backend(self) -> None:
        """Everything is over, here and where it is read from."""
        # An abort loses nothing then. NCCL's orderly end waits for all ranks of this host, and is for those who may
        # have called what was not seen.
        orderly = self._serves_torch or not self.talks or not self._queued
        self._in_a_thread(lambda backend: traffic.HERE.left(self, backend.shutdown if orderly else backend.abort))

    def _abort_backend(self) -> None:
        """End the kernels."""
        self._in_a_thread(self._end_kernels)

    def _end_kernels(self, backend: Any) -> None:  # noqa: ANN401
        finish = self._finish
        if finish is not None:
            # Who left may have done its part of what is under way: that ends well by itself, and at once.
            name = f"{self._ctx.name} finishes"
            finishing = threading.Thread(target=traffic.quietly, args=(finish,), name=name, daemon=True)
            finishing.start()
            finishing.join(SETTLING)

        try:
            with traffic.HERE.ending():
                backend.abort()
        finally:
            traffic.HERE.left(self)

    def _in_a_thread(self, end: Callable[[Any], None]) -> None:
        """Once, in a thread of its own: it can take a while, and who is called back must not wait. close() does."""
        name = f"{self._ctx.name} ends NCCL"
        with self._lock:
            if self._backend is None or self._ending is not None:
                return

            ending = partial(end, self._backend)
            self._ending = threading.Thread(target=traffic.quietly, args=(ending,), name=name, daemon=True)
            self._ending.start()

    # What the others say

    def _on_letter(self, rank: int, words: Words) -> None:
        assert self._letters is not None
        if "ask" in words:
            self._letters.send(rank, {"told": words["ask"], **self._calls.said()})
        elif "told" in words:
            self._calls.answered(rank, words)
        elif "gave up" in words:
            # What is under way here has a deadline of its own.
            text = words["gave up"]
            self._end(lambda call: AbortedError(f"{self._label(call)}: {text}"), abort=False)
        elif "refused" in words:
            self._on_refusal(rank, words["refused"], words["text"])
        elif "leaving" in words:
            self._on_leaving(rank, words["leaving"], words["launched"])
        elif "settled" in words:
            self._settled[rank].set()

    def _on_refusal(self, rank: int, number: int, text: str) -> None:
        with self._lock:
            if number in self._own_refusals:
                return  # every rank's call was wrong

            self._refused[number] = rank, text

        if number <= self._calls.launched:
            self._end(self._mismatch(rank, text))

    def _on_leaving(self, rank: int, number: int, launched: int) -> None:
        self._left[rank] = number
        if self._calls.launched > number:
            self._end(self._without(rank))

        finish = self._finish
        if finish is None:
            return

        def answer() -> None:
            assert self._letters is not None
            with suppress(Exception):  # however it ended: nothing is read any more
                self._calls.wait_launched(launched, self._ctx.timeout)
                finish()

            self._letters.send(rank, {"settled": number})

        threading.Thread(target=answer, name=f"{self._ctx.name} settles", daemon=True).start()

    def _on_end(self, rank: int, error: DtorchError) -> None:
        self._settled[rank].set()
        if rank in self._left or self._ended:
            return

        self._end(self._as(error, f"(tag {TAG}): "))

    # Errors

    def _mismatch(self, rank: int, text: str) -> Failure:
        return lambda call: CollectiveMismatchError(f"{self._label(call)}: rank {rank} refused its part: {text}")

    def _without(self, rank: int) -> Failure:
        pid, number = self._ctx.topology[rank].pid, self._left[rank]
        how = "closed it, returned, or its process ended"
        text = f"rank {rank} (pid {pid}) has left {self._ctx.label} ({how}) after its call #{number}"
        return lambda call: PeerLostError(f"{self._label(call)}: {text}, so nobody can take its part any more")

    def _as(self, error: DtorchError, head: str) -> Failure:
        """The store's error, of other calls: its text begins after ``head``."""
        kind, text = type(error), str(error)
        reason = text.partition(head)[2] or text
        return lambda call: kind(f"{self._label(call)}: {reason}")

    def _raise_over(self, call: str) -> None:
        assert self._over is not None
        self._told = True
        raise self._over(call)

    def _label(self, call: str) -> str:
        return f"group {self._ctx.name!r}, rank {self._ctx.rank}, {call}"
