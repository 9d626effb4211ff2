"""What a ThreadGroup's ranks send to each other, one to one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dtorch_core._groups import p2p
from dtorch_core._groups.group_calls import GroupCalls
from dtorch_core._groups.work import Work
from dtorch_core._shapes import describe
from dtorch_core.checks import check_written, plain_tensor


class Messages(GroupCalls):
    """A part of :class:`ThreadGroup`."""

    def send(
        self, x: Tensor, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:  # noqa: ANN401
        """Send ``x`` to rank ``dst``, which may be this one. Returns when ``x`` may be rewritten.

        It does not wait for the receiver. Messages of one source, destination and tag arrive in order.
        """
        x = plain_tensor(x)
        call = f"send({describe(x)}, dst={dst}, tag={tag})"
        record, _ = self._begin(call, collective=False)
        seconds = self._seconds(call, timeout, async_op)
        self._check(call, x)
        self._check_p2p(call, dst, tag)
        sent = p2p.send(self.process_group, self._beside, x.detach(), dst, tag, seconds)
        work = Work(call, None, lambda _: (sent, lambda: None), seconds, self.device, record)
        return work if async_op else work.result()

    def recv(
        self,
        src: int | None = None,
        tag: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """The next message of rank ``src`` (of any rank where None) with ``tag``; its shape need not be known.

        :raises StoreTimeoutError: if none has come; no message is lost, and the call can be repeated.
        :raises CollectiveMismatchError: if ``out`` has another shape or dtype; the message is dropped.
        """
        call = f"recv(src={src}, tag={tag})"
        record, _ = self._begin(call, collective=False)
        seconds = self._seconds(call, timeout, async_op)
        self._check_p2p(call, src, tag)
        into = None if out is None else plain_tensor(out)
        if into is not None:
            check_written(f"{self._label(call)}, out=", into)

        received = p2p.receive(self.process_group, self._beside, self.device, src, tag, into, seconds)

        def message() -> Any:  # noqa: ANN401
            return received.result()[0] if out is None else out

        try:
            work = Work(call, None, lambda _: (received, message), seconds, self.device, record)
            return work if async_op else work.result()
        except BaseException:  # Ctrl-C, too: nobody waits for this receipt again
            received.cancel()
            raise
