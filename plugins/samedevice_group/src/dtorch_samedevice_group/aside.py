"""Streams for async collectives, beside those that the ranks compute on.

A blocking collective is queued on the current stream, as if the rank did it itself. An async one is queued on a stream
of its own, behind what the current one has queued by then: what the rank queues next runs beside it, and ``wait`` puts
them in order again. So does a barrier, for those whose Work was dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch

from dtorch_core.joint import Onward, Ticket

HIGH = -1
"""Its kernels' blocks go first as the GPU gets room: a large kernel beside them would let them wait for its end."""


class Aside:
    """One rank's stream beside its compute, on each GPU. Made when it is first needed."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def here(self, device: int) -> torch.cuda.Stream | None:
        """The stream, behind what this thread's current one has queued.

        None while that is being captured for a CUDA graph: what is captured stays on the stream that it is called on.
        """
        if torch.cuda.is_current_stream_capturing():
            return None

        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device, priority=HIGH))

        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


class Behind(Onward):
    """A ticket whose wait orders the stream after earlier calls, too: who has come to this one came to those before."""

    def __init__(self, ticket: Ticket, earlier: Sequence[Ticket]) -> None:
        super().__init__(ticket)
        self._earlier = earlier

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        super().wait(timeout, stream)
        for ticket in self._earlier:
            with suppress(Exception):  # which its own Work raises
                ticket.wait(0, stream)


@contextmanager
def on(streams: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """With it, these are the current streams of their GPUs."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))

        yield
