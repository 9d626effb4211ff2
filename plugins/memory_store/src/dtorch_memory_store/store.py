"""MemoryTensorStore: threads of one process hand each other tensors without a copy."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from dtorch_core import BackendContext, ProtocolError, TensorStore, streams
from dtorch_core._copies import cloned
from dtorch_core._goodbyes import say_elsewhere
from dtorch_core._memory import fresh, own_bytes
from dtorch_core.checks import (
    check_device,
    check_empty,
    check_key,
    check_publish,
    check_timeout,
    check_written,
    plain_tensor,
)
from dtorch_core.joint import Offer, Ticket, Work
from dtorch_core.mail import Receipt
from dtorch_memory_store import forked
from dtorch_memory_store.mail import Message
from dtorch_memory_store.publication import Publication
from dtorch_memory_store.session import Session

# Without a lock: setdefault and pop are atomic, and a lock could be held when the garbage collector closes a handle.
_sessions: dict[str, Session] = {}


class MemoryTensorStore(TensorStore):
    """One rank's handle. The state is in the session that all ranks of the opening share."""

    def __init__(self, ctx: BackendContext) -> None:
        super().__init__(ctx)
        self._token = ctx.token
        self._session = _sessions.setdefault(self._token, Session(self.label, ctx.world_size))
        # A handle that is dropped says goodbye too.
        self._dropped = weakref.finalize(self, _dropped, self._session, self._token, ctx.rank)
        self._dropped.atexit = False
        forked.remember(self)

    def lose(self, instead: forked.Forked) -> None:
        """In a forked child: the session is the parent's."""
        self._dropped.detach()
        self._session = instead  # type: ignore[assignment]  # it says what is wrong, whatever is asked of it

    def src_set(
        self,
        key: str,
        tensor: Tensor,
        get_count: int,
        *,
        stream: torch.cuda.Stream | None = None,
        dest_device: torch.device | str | None = None,
        writable: bool = False,
    ) -> None:
        if type(tensor) is not Tensor:
            tensor = plain_tensor(tensor)

        check_publish(key, tensor, get_count, self.world_size)
        if writable:
            check_written(f"src_set({key!r}, writable=True)", tensor)

        target = None if dest_device is None else self._target(key, tensor, dest_device, writable)
        if target is not None and target.type != tensor.device.type:
            shared, ready = streams.copy_to_device(tensor.detach(), target, stream)
        else:
            plain = tensor if type(tensor) is Tensor and not tensor.requires_grad else tensor.detach()
            shared = plain if plain.is_cuda else own_bytes(plain)
            ready = streams.record(tensor, stream)

        if ready is not None:
            self._session.keys.uses_events = True

        self._session.keys.put(key, Publication(self.rank, shared, get_count, ready))

    def src_wait_until_get_finished(
        self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None
    ) -> None:
        publication = self._session.keys.wait(self.rank, key, self._seconds(timeout))
        if publication.events:
            assert publication.ready is not None, "consumers record events of CUDA tensors only"
            # The producer's device: a consumer's event can be of another one. (The tensor is gone by now.)
            queue = stream if stream is not None else torch.cuda.current_stream(publication.ready.device)
            for event in publication.events:
                queue.wait_event(event)

    def dest_get(self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None) -> Tensor:
        if type(key) is not str:
            check_key("dest_get", key)

        publication = self._session.keys.get(self.rank, key, self._seconds(timeout))
        tensor = publication.tensor
        assert tensor is not None, "a tensor is kept while anybody borrows it"
        if publication.ready is not None:
            if tensor.is_cuda:
                streams.order_after(publication.ready, tensor, stream)
                streams.keep_until_done(tensor, stream)
            else:
                streams.host_wait(publication.ready)  # moved to the CPU by its producer: wait for that copy

        return tensor.detach()  # an alias of each consumer's own: metadata is not shared

    def dest_finish_get(self, key: str, *, stream: torch.cuda.Stream | None = None) -> None:
        keys, event = self._session.keys, None
        if keys.uses_events:
            tensor = keys.borrowed(self.rank, key)
            event = streams.record(tensor, stream) if tensor is not None else None

        keys.finish(self.rank, key, event)

    def reset(self, *, timeout: float | None = None) -> None:
        self._session.reset(self.rank, self._seconds(timeout))

    def barrier(self, *, timeout: float | None = None) -> None:
        self._session.barrier(self.rank, self._seconds(timeout))

    def empty(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        call = f"{self.label}, empty"
        sizes = check_empty(call, size, dtype)
        where = self.device if device is None else check_device(call, device)
        self._session.check_open(self.rank)
        return fresh(call, sizes, dtype, where)

    def close(self) -> None:
        _leave(self._session, self._token, self.rank)
        self._dropped.detach()  # not before: Ctrl-C

    def abort(self, reason: str, *, died: bool = False) -> None:
        if died:
            self._session.die(self.rank, reason)
        else:
            self._session.abort(reason)

    def post(
        self,
        key: str,
        note: str,
        tensors: Sequence[Tensor],
        work: Work,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> Ticket:
        return self._session.joint.post(key, Offer(self.rank, note, tuple(tensors)), work, stream)

    def send(self, tensor: Tensor, dst: int, tag: int, *, stream: torch.cuda.Stream | None = None) -> None:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():  # of None it would initialise CUDA
            copy = cloned(tensor.detach(), torch.contiguous_format)

        self._session.letters.deliver(Message(self.rank, tag, copy, streams.record(copy, stream)), dst)

    def expect(self, src: int | None, tag: int) -> Receipt:
        return self._session.letters.expect(self.rank, src, tag)

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self.timeout

        if type(timeout) is float and 0.0 <= timeout < math.inf:
            return timeout

        return check_timeout(f"{self.label}, rank {self.rank}", timeout)

    def _target(self, key: str, tensor: Tensor, device: torch.device | str, writable: bool) -> torch.device:
        """Where the consumers want the tensor."""
        if writable and str(device).partition(":")[0] != tensor.device.type:
            raise ProtocolError(
                f"{self.label}, key {key!r}: writable=True, but dest_device={str(device)!r} "
                f"publishes a copy, so what consumers write would not reach the tensor on {tensor.device}"
            )

        return check_device(f"src_set({key!r})", device)


def _dropped(session: Session, token: str, rank: int) -> None:
    say_elsewhere(partial(_leave, session, token, rank), f"goodbye of rank {rank}")


def _leave(session: Session, token: str, rank: int) -> None:
    session.close(rank)
    _sessions.pop(token, None)
