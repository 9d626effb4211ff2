"""FileTensorStore: processes of one host exchange tensors through memory that they map."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dtorch_core import BackendContext, ProtocolError, TensorStore, streams
from dtorch_core._goodbyes import say_elsewhere, uncaught
from dtorch_core._memory import fresh
from dtorch_core.checks import (
    check_device,
    check_empty,
    check_key,
    check_publish,
    check_timeout,
    check_written,
    plain_tensor,
)
from dtorch_core.declared import Declared
from dtorch_core.joint import Offer, Ticket, Work
from dtorch_core.mail import Receipt
from dtorch_file_store import gpu_values, opening
from dtorch_file_store.hosted import post_through_host
from dtorch_file_store.session import Session
from dtorch_file_store.values import Value, message_value, own_value


class FileTensorStore(TensorStore):
    """One rank's handle. What the ranks of this process share is in the session."""

    def __init__(self, ctx: BackendContext) -> None:
        super().__init__(ctx)
        self._session = opening.join(ctx)
        self._shared = bool(self._session.node.links)
        # A handle that is dropped says goodbye too.
        self._dropped = weakref.finalize(self, _dropped, self._session, ctx.rank)

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
        session = self._session
        if type(tensor) is not Tensor:
            tensor = plain_tensor(tensor)

        check_publish(key, tensor, get_count, self.world_size)
        if writable:
            check_written(f"src_set({key!r}, writable=True)", tensor)

        if session.node.forked:
            session.check(f"src_set({key!r})")

        plain = tensor if type(tensor) is Tensor and not tensor.requires_grad else tensor.detach()
        if plain.is_cuda or dest_device is not None:
            value = self._gpu_value(key, plain, stream, dest_device, writable)
        else:
            value = own_value(plain, session.arena, shared=self._shared, writable=writable)

        try:
            session.keys.put(self.rank, key, get_count, value, self.timeout)
        except BaseException:
            if not session.keys.holds(value):  # Ctrl-C may come when it is set already
                value.finished()
                value.abandon(())

            raise

        if value.settles:
            value.published()

    def src_wait_until_get_finished(
        self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None
    ) -> None:
        publication = self._session.keys.wait(self.rank, key, self._seconds(timeout))
        if publication.outlet is not None:
            publication.outlet.settle(publication.marks, stream)

    def dest_get(self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None) -> Tensor:
        if type(key) is not str:
            check_key("dest_get", key)

        publication = self._session.keys.get(self.rank, key, self._seconds(timeout))
        value = publication.value
        assert value is not None, "a value is kept while anybody borrows it"
        try:
            return value.borrow(stream)
        except BaseException:
            self._session.keys.keep(self.rank, publication)
            raise

    def dest_finish_get(self, key: str, *, stream: torch.cuda.Stream | None = None) -> None:
        if self._session.node.forked:
            self._session.check(f"dest_finish_get({key!r})")

        keys, mark = self._session.keys, None
        publication = keys.borrowed(self.rank, key)
        if publication is not None and publication.value is not None and publication.value.marks:
            mark = publication.value.mark(stream)
            if publication.owner in self._session.presence.closed:
                publication.value.drain(stream)  # its producer has left, and has no stream that would wait

        keys.finish(self.rank, key, mark)

    def reset(self, *, timeout: float | None = None) -> None:
        self._session.reset(self.rank, self._seconds(timeout))

    def barrier(self, *, timeout: float | None = None) -> None:
        self._session.barrier(self.rank, self._seconds(timeout))

    def empty(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        call = f"{self.label}, empty"
        sizes = check_empty(call, size, dtype)
        where = check_device(call, self.device if device is None else device)
        if self._session.node.forked:
            self._session.check(f"empty({sizes})")

        self._session.check_open(self.rank)
        if where.type == "cpu" and self._shared:
            return self._session.arena.empty(sizes, dtype)

        return fresh(call, sizes, dtype, where)

    def close(self) -> None:
        self._dropped.detach()
        self._session.close(self.rank)

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
        if self._session.node.forked:
            self._session.check(f"rank {self.rank}, {key}")  # a group's: "collective #1"

        joint, offer = self._session.joint, Offer(self.rank, note, tuple(tensors))
        if tensors and tensors[0].is_cuda:
            reason = self._session.gpu.why_host_together() if self._shared else None
            if reason is not None:
                return post_through_host(joint, key, offer, work, stream, reason)

            return joint.post(key, offer, work, stream)

        if not isinstance(work, Declared):
            return super().post(key, note, tensors, work, stream=stream)

        return joint.post(key, offer, work)

    def send(self, tensor: Tensor, dst: int, tag: int, *, stream: torch.cuda.Stream | None = None) -> None:
        if self._session.node.forked:
            self._session.check(f"send to rank {dst}")

        near = self._session.node.is_near(dst)
        if tensor.is_cuda:
            value = gpu_values.message(self._session.gpu, tensor.detach(), stream, near=near)
        else:
            value = message_value(tensor.detach(), self._session.arena, near=near)

        self._session.letters.send(self.rank, dst, tag, value)

    def expect(self, src: int | None, tag: int) -> Receipt:
        if self._session.node.forked:
            self._session.check(f"rank {self.rank}, recv")

        return self._session.letters.expect(self.rank, src, tag)

    def _gpu_value(
        self,
        key: str,
        tensor: Tensor,
        stream: torch.cuda.Stream | None,
        dest_device: torch.device | str | None,
        writable: bool,
    ) -> Value:
        """How to publish what is on a CUDA device, or is to be there."""
        session = self._session
        target = tensor.device if dest_device is None else check_device(f"src_set({key!r})", dest_device)
        if target.type == tensor.device.type:
            if tensor.is_cuda:
                return gpu_values.publish(session.gpu, tensor, stream, writable=writable)

            return own_value(tensor, session.arena, shared=self._shared, writable=writable)

        if writable:
            raise ProtocolError(
                f"{self.label}, key {key!r}: writable=True, but dest_device={str(dest_device)!r} publishes a copy, so "
                f"what consumers write would not reach the tensor on {tensor.device}"
            )

        if tensor.is_cuda:
            return gpu_values.publish_to_host(session.gpu, tensor, stream)

        copy, _ = streams.copy_to_device(tensor, target, stream)
        return gpu_values.publish(session.gpu, copy, stream, writable=False)

    def _seconds(self, timeout: float | None) -> float:
        if self._session.node.forked:
            self._session.check(f"rank {self.rank}")

        if timeout is None:
            return self.timeout

        if type(timeout) is float and 0.0 <= timeout < math.inf:
            return timeout

        return check_timeout(f"{self.label}, rank {self.rank}", timeout)


def _dropped(session: Session, rank: int) -> None:
    say_elsewhere(partial(_leave, session, rank), f"goodbye of rank {rank}")


def _leave(session: Session, rank: int) -> None:
    error = uncaught()
    if error is not None:
        session.die(rank, f"rank {rank} failed: {error}")

    session.close(rank)
