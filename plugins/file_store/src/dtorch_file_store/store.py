"""FileTensorStore: processes of one host exchange tensors through memory that they map."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from dtorch_core import BackendContext, TensorStore
from dtorch_core.checks import check_device, check_key, check_publish, check_timeout
from dtorch_core.declared import Declared
from dtorch_core.joint import Offer, Ticket, Work
from dtorch_core.mail import Receipt
from dtorch_file_store import opening
from dtorch_file_store.session import Session
from dtorch_file_store.values import message_value, own_value


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
        check_publish(key, tensor, get_count)
        if session.node.forked:
            session.check(f"src_set({key!r})")

        plain = tensor if type(tensor) is Tensor and not tensor.requires_grad else tensor.detach()
        value = own_value(plain, session.arena, shared=self._shared, writable=writable)
        try:
            session.keys.put(self.rank, key, get_count, value, self.timeout)
        except BaseException:
            value.finished()
            raise

    def src_wait_until_get_finished(
        self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None
    ) -> None:
        publication = self._session.keys.wait(self.rank, key, self._seconds(timeout))
        if publication.outlet is not None:
            publication.outlet.settle()

    def dest_get(self, key: str, *, stream: torch.cuda.Stream | None = None, timeout: float | None = None) -> Tensor:
        if type(key) is not str:
            check_key("dest_get", key)

        publication = self._session.keys.get(self.rank, key, self._seconds(timeout))
        value = publication.value
        assert value is not None, "a value is kept while anybody borrows it"
        return value.borrow(stream)

    def dest_finish_get(self, key: str, *, stream: torch.cuda.Stream | None = None) -> None:
        self._session.keys.finish(self.rank, key)

    def reset(self, *, timeout: float | None = None) -> None:
        self._session.reset(self.rank, self._seconds(timeout))

    def barrier(self, *, timeout: float | None = None) -> None:
        self._session.barrier(self.rank, self._seconds(timeout))

    def empty(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        where = check_device(f"{self.label}, empty", self.device if device is None else device)
        if where.type == "cpu" and self._shared:
            return self._session.arena.empty(tuple(size), dtype)

        return torch.empty(tuple(size), dtype=dtype, device=where)

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
        if not isinstance(work, Declared):
            return super().post(key, note, tensors, work, stream=stream)

        return self._session.joint.post(key, Offer(self.rank, note, tuple(tensors)), work)

    def send(self, tensor: Tensor, dst: int, tag: int, *, stream: torch.cuda.Stream | None = None) -> None:
        value = message_value(tensor.detach(), self._session.arena, near=self._session.node.is_near(dst))
        self._session.letters.send(self.rank, dst, tag, value)

    def expect(self, src: int | None, tag: int) -> Receipt:
        return self._session.letters.expect(self.rank, src, tag)

    def _seconds(self, timeout: float | None) -> float:
        if self._session.node.forked:
            self._session.check(f"rank {self.rank}")

        if timeout is None:
            return self.timeout

        if type(timeout) is float and 0.0 <= timeout < math.inf:
            return timeout

        return check_timeout(f"{self.label}, rank {self.rank}", timeout)


def _dropped(session: Session, rank: int) -> None:
    # The garbage collector calls this wherever a thread happens to be, also inside the mutex that close() takes.
    if session.node.mutex.acquire(blocking=False):
        session.node.mutex.release()
        session.close(rank)
    else:
        threading.Thread(target=session.close, args=(rank,), name=f"goodbye of rank {rank}", daemon=True).start()
