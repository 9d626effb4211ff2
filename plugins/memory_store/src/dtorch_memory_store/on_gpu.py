"""Orders joint work on a GPU with the ranks' streams, by as few events as that takes.

As a rule all ranks use the default stream, and so does the work: what is queued first is done first. An event there
would order nothing, and each call of torch that has to do with one costs as much as a kernel's launch, or lets another
rank take the GIL. So only what is not on the default stream has an event at once. What is, gets one once it is needed:
all threads have that stream in common, it is never destroyed, and no CUDA graph is captured on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dtorch_core import streams
from dtorch_core._events import recorded
from dtorch_core.joint import Offer, Work


class Ready(NamedTuple):
    """When what a rank offers may be used."""

    rank: int
    device: int
    """That of its first tensor."""
    event: torch.cuda.Event | None
    """None: after what the device's default stream has queued."""

    @classmethod
    def of(cls, offer: Offer, stream: torch.cuda.Stream | None) -> Ready:
        """After what ``stream`` has queued; the rank's current one where None."""
        first = offer.tensors[0]
        device = first.get_device()
        if stream is None and streams.raw_current(device) == streams.DEFAULT:
            return cls(offer.rank, device, None)

        return cls(offer.rank, device, streams.record(first, stream))


class Queued:
    """A piece of work on the stream that it is queued on."""

    __slots__ = ("_device", "_event", "_stream")

    def __init__(self, ready: Sequence[Ready], stream: torch.cuda.Stream | None) -> None:
        """
        :param stream: given by the rank that came last; its current one where None.
        """
        self._device = ready[0].device
        if stream is None and streams.raw_current(self._device) != streams.DEFAULT:
            stream = torch.cuda.current_stream(self._device)

        self._stream = stream
        """None: the default one."""
        self._event: torch.cuda.Event | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream if self._stream is not None else torch.cuda.default_stream(self._device)

    def run(
        self, ready: Sequence[Ready], offers: Sequence[Offer], work: Work, stream: torch.cuda.Stream | None
    ) -> None:
        """Queue the work behind all that the ranks' streams have queued. Its tasks only queue work too.

        :param stream: as it was given; None is the current one, which is not entered: that costs as much as a launch.
        """
        default = self._device if self._stream is None else None
        # What a rank offers on the same default stream comes before the work by itself.
        apart = [each for each in ready if each.event is not None or each.device != default]
        for each in apart:
            # More may have been queued on the default stream since the rank came: that is waited for too, and no harm.
            event = each.event if each.event is not None else streams.record_default(each.device)
            self.stream.wait_event(event)

        try:
            if stream is None:  # as a rule, and without a context of its own
                for task in work(offers):
                    task()
            else:
                with torch.cuda.stream(stream):
                    for task in work(offers):
                        task()
        finally:
            if apart:
                _keep(offers, {each.rank for each in ready} - {each.rank for each in apart}, self.stream)

            if self._stream is not None:
                self._event = recorded(self._stream)

    def order(self, device: int | None, stream: torch.cuda.Stream | None) -> None:
        """Make ``stream`` wait for it; the current one of ``device`` where None.

        :param device: the waiting rank's; the work's where None.
        """
        where = self._device if device is None else device
        if stream is None and self._stream is None and where == self._device:
            if streams.raw_current(where) == streams.DEFAULT:
                return

        event = self._event
        if event is None:  # after more than the work; and if two threads come here at once, either's is good
            event = self._event = streams.record_default(self._device)

        (stream if stream is not None else torch.cuda.current_stream(where)).wait_event(event)


def _keep(offers: Sequence[Offer], following: set[int], stream: torch.cuda.Stream) -> None:
    # The allocator hands out memory again in the order of the stream that it was first asked for on.
    for offer in offers:
        if offer.rank not in following:
            for tensor in offer.tensors:
                streams.keep_until_done(tensor, stream)
