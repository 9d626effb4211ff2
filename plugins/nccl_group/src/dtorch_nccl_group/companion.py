"""Beside NCCL: carries texts and messages, learns who died, aborted, left or gave up, and ends the kernels then.

NCCL tells its ranks nothing of each other. A control store over the same ranks does, where there is one: on one host.
Across hosts the companion only counts, and the timeout is what remains.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core import (
    AbortedError,
    BackendContext,
    DtorchError,
    PeerLostError,
    StoreTimeoutError,
    TensorStore,
    open_store,
)
from dtorch_core._groups.fingerprints import compare
from dtorch_core._groups.foreign_work import Over
from dtorch_core._groups.order import LaunchOrder, Turn
from dtorch_core._text import describe_error, one_line
from dtorch_core.declared import Declared, Result, Shapes
from dtorch_core.extras import Place
from dtorch_core.joint import Offer, Task, Ticket
from dtorch_nccl_group.endings import Endings
from dtorch_nccl_group.messages import MessageWork

GRACE = 2.0
"""Seconds in which the reason for an error of NCCL may arrive after it."""


class NcclCompanion(Endings):
    """One rank's. Thread-safe."""

    def __init__(
        self,
        ctx: BackendContext,
        stores: tuple[TensorStore, TensorStore] | None,
        group: dist.ProcessGroup,
        backend: Any,  # noqa: ANN401
        order: LaunchOrder,
        *,
        finish: Callable[[], None] | None,
        limit: Callable[[Any, float], None],
    ) -> None:
        """
        :param order: in which the collectives of this rank's GPU begin.
        :param limit: sets how many seconds calls of a backend may take that begin later.
        """
        self._limit = limit
        self._store = stores[0] if stores is not None else None
        self._order = order
        self._splits = itertools.count()
        self._exchanges = itertools.count(1)
        self._own_store: TensorStore | None = None
        super().__init__(ctx, stores, group, backend, finish)

    # Calls

    def begin(self, call: str, *, collective: bool) -> int:
        if self._over is not None:
            self._raise_over(call)

        number = self._calls.begin(call, collective=collective)
        if self._left and collective:
            for rank, last in list(self._left.items()):
                if last < number:
                    self._told = True
                    raise self._without(rank)(call)

        return number

    def begin_alone(self, call: str) -> int | None:
        if self._over is not None or self._left or self._refused or self._order.holds_back:
            return None

        return self._calls.begin(call, collective=True)

    def turn(self, call: str, ticket: Ticket | None) -> Turn | None:
        return self._order.turn(call, ticket)

    @contextmanager
    def limited(self, timeout: float) -> Iterator[None]:
        backend = self._backend
        if backend is None:  # another thread has closed it: the call that begins here will say so
            yield
            return

        self._limit(backend, timeout)
        try:
            yield
        finally:
            self._limit(backend, self._ctx.timeout)

    def launched(self, call: str, number: int, work: Any) -> None:  # noqa: ANN401
        self._last = call, work
        self._calls.has_launched(number)
        lacks = False
        if self._refused and number in self._refused:
            rank, text = self._refused[number]
            self._end(self._mismatch(rank, text))
            lacks = True

        if self._left:  # since this call was counted
            for rank, last in list(self._left.items()):
                if last < number:
                    self._end(self._without(rank))
                    lacks = True

        # It came meanwhile, and this kernel may wait for ever.
        if self._over is not None and (lacks or not self._is_through(work)):
            self._abort_backend()
            self._raise_over(call)

    def _is_through(self, work: Any) -> bool:  # noqa: ANN401
        """It has ended, and well: whoever has gone since was there. A kernel may look so that was never queued."""
        return isinstance(work, Over) or (not self._queued and not work.is_under_way())

    def refused(self, call: str, error: Exception, *, exchange: bool, number: int | None) -> None:
        # One that waited for sizes is not the last one any more.
        number, text = number or self._calls.number, f"{call}: raised {describe_error(error)}"
        with self._lock:
            self._own_refusals.add(number)

        if self._letters is None or self._over is not None:
            return

        with suppress(DtorchError):
            if exchange:
                self.post_notes(text, text, "")
            else:
                self._letters.send_all({"refused": number, "text": text})

    def explain(self, call: str, error: Exception) -> Exception:
        if getattr(error, "_explained", False):
            return error

        known = self._known(call, error)
        known._explained = True  # type: ignore[attr-defined]
        if known is not error and known.__cause__ is None:
            known.__cause__ = error

        return known

    def _known(self, call: str, error: Exception) -> Exception:
        if isinstance(error, StoreTimeoutError):
            return self._gave_up(call, str(error))

        if isinstance(error, DtorchError) or not isinstance(error, RuntimeError):
            if isinstance(error, AbortedError) or (isinstance(error, PeerLostError) and not self._left):
                self._end(self._as(error, f"{call}: "))

            self._told = self._told or self._over is not None
            return error

        # torch's own. Its peers' reason may still be under way.
        self._is_over.wait(GRACE if self.talks else 0)
        if self._over is not None:
            self._told = True
            return self._over(call)

        text = one_line(str(error).splitlines()[0] if str(error) else type(error).__name__)
        if "time" in text.lower():
            return self._gave_up(call, f"{self._label(call)}: not every rank had come in time: {text}")

        table = self._table()
        self._told = True
        self._end(lambda later: AbortedError(f"{self._label(later)}: NCCL failed in {call}: {text}"))
        self._tell_reason(f"NCCL failed in {call} of rank {self._ctx.rank}: {text}")
        return PeerLostError(f"{self._label(call)}: NCCL failed: {text}\n{table}")

    # Texts and messages

    def post_notes(self, same: str, call: str, text: str) -> tuple[Ticket, Place]:
        assert self._store is not None
        key, number = f"exchange {next(self._exchanges)}", self._calls.number
        work = _Same(f"group {self._ctx.name!r}, {key}")
        ticket = self._store.post(key, f"#{number} {same}\n#{number} {call}\n{text}", (), work)
        return ticket, Turn.place

    def carries(self, peer: int | None) -> bool:
        return self.talks or peer == self._ctx.rank

    def send(self, tensor: Tensor, dst: int, tag: int) -> Over:
        store, rank = self._mail(dst)
        with torch.inference_mode(False):  # the copy is the receiver's, who may be in no inference mode
            store.send(tensor, rank, tag)

        return Over()

    def receive(self, src: int | None, tag: int, buffer: Tensor | None = None) -> MessageWork:
        store, rank = self._mail(src)
        label = self._label(f"recv(src={src}, tag={tag})")
        return MessageWork(store.expect(rank, tag), buffer, self._device, self._ctx.timeout, label)

    def _mail(self, peer: int | None) -> tuple[TensorStore, Any]:
        if self._store is not None:
            return self._store, peer

        # Across hosts: to oneself only. NCCL's send to oneself would wait for a receive that comes later.
        if self._own_store is None:
            made = open_store(
                f"{self._ctx.name}/self/{uuid.uuid4().hex}", rank=0, world_size=1, device=self._ctx.device
            )
            with self._lock:
                first = self._own_store is None and not self._closed
                if first:
                    self._own_store = made
                    self._stores.append(made)

            if not first:  # another thread was quicker, or close()
                made.close()

        return self._own_store or made, 0

    # torch.distributed

    def serve_torch(self, group: dist.ProcessGroup) -> None:
        self._serves_torch = True
        # c10d would split sub-groups off one with a device bound to it, and the ranks outside would wait for all. The
        # communicator is made: nothing has to guess the device.
        group.bound_device_id = None

    def count_split(self) -> int:
        return next(self._splits)

    # Errors

    def _gave_up(self, call: str, text: str) -> StoreTimeoutError:
        self._told = True
        if self._over is not None:  # another rank was first
            return StoreTimeoutError(text)

        table = self._table()
        late = one_line(text.partition(f"{call}: ")[2] or text)
        reason = f"rank {self._ctx.rank} gave up on {call}: {late}"
        self._tell_reason(reason)
        self._end(lambda later: AbortedError(f"{self._label(later)}: {reason}"))
        return StoreTimeoutError(f"{text}\n{table}" if table else text)

    def _tell_reason(self, reason: str) -> None:
        if self._letters is not None:
            self._letters.send_all({"gave up": reason})

    def _table(self) -> str:
        """Who called what last. Asks the others, and waits a moment for their answers."""
        if self._letters is None:
            return f"last call of {self._calls.own()}; other hosts can't be asked"

        asked = [rank for rank in self._letters.others if rank not in self._left]
        number = self._calls.ask(asked)
        for rank in asked:
            self._letters.send(rank, {"ask": number})

        return self._calls.table(number, self._left)


class _Same(Declared):
    """Joint work that only compares what the ranks call."""

    __slots__ = ("_label",)

    def __init__(self, label: str) -> None:
        self._label = label

    def __call__(self, offers: Sequence[Offer]) -> Sequence[Task]:
        compare(self._label, [offer.note for offer in offers])
        return ()

    def results(self, notes: Sequence[str], shapes: Shapes) -> Sequence[Result]:
        compare(self._label, notes)
        return ()
