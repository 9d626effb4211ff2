"""One rank's share in a call between processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from dtorch_core import DtorchError
from dtorch_core.joint import Ticket, WithEarlier
from dtorch_file_store.calls import Call
from dtorch_file_store.cuda.current import current

if TYPE_CHECKING:
    from dtorch_file_store.joint import Joint


class FileTicket(Ticket):
    """One rank's share in a call."""

    __slots__ = ("_call", "_joint", "_ordinal", "_rank")

    def __init__(self, joint: Joint, call: Call, rank: int, ordinal: int) -> None:
        """
        :param ordinal: the CUDA device of the rank's tensors; -1 on the CPU.
        """
        self._joint = joint
        self._call = call
        self._rank = rank
        self._ordinal = ordinal

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        call = self._call
        if not call.finished or call.error is not None:
            self._joint.wait_for(call, self._rank, timeout)

        if call.done and self._ordinal >= 0:
            self._joint.on_gpu.order_after(call, self._rank, stream if stream is not None else current(self._ordinal))

    def __del__(self) -> None:
        try:
            held = self._rank in self._call.held
        except AttributeError:  # Ctrl-C came before it was made
            return

        if held:
            self._joint.on_gpu.drop(self._call, self._rank)

    def notes(self) -> Sequence[str]:
        return self._call.notes

    def done(self) -> bool:
        return self._joint.done(self._call, self._rank)

    def failed(self) -> bool:
        """It ended badly, or never will end; of one that is done."""
        return not self._call.finished or self._call.error is not None

    def written(self) -> list[int]:
        """Which of this rank's CPU tensors were written; once the work is done."""
        return [place.number for place in self._call.written if place.rank == self._rank]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._joint.notify(self._call, self._rank, callback)

    def with_earlier(self) -> Ticket:
        earlier = self._joint.unfinished(self._rank)
        return _CallsBefore(self, self._joint, self._rank, earlier) if earlier else self


class _CallsBefore(WithEarlier):
    def __init__(self, ticket: FileTicket, joint: Joint, rank: int, earlier: Sequence[Call]) -> None:
        super().__init__(ticket)
        self._failed, self._joint, self._rank, self._earlier = ticket.failed, joint, rank, earlier

    def _await_earlier(self, timeout: float, stream: torch.cuda.Stream | None) -> None:
        deadline = time.monotonic() + timeout
        for call in self._earlier:  # who has not come to one by now will not come
            if call.complete and not call.finished:
                try:
                    self._joint.wait_for(call, self._rank, max(deadline - time.monotonic(), 0))
                except DtorchError:
                    if not call.finished:
                        raise

    def _is_over(self) -> bool:
        return self._failed() or all(
            call.finished or not call.complete or self._joint.done(call, self._rank) for call in self._earlier
        )
