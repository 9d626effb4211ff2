"""Joint work on CUDA tensors that can't be mapped everywhere: done on copies in host memory."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from dtorch_core import streams
from dtorch_core._copies import copy_into
from dtorch_core.declared import Declared
from dtorch_core.errors import UnsupportedOperationError
from dtorch_core.joint import Offer, Onward, Ticket, Work
from dtorch_file_store.joint import Joint
from dtorch_file_store.tickets import FileTicket


def post_through_host(
    joint: Joint, key: str, offer: Offer, work: Work, stream: torch.cuda.Stream | None, reason: str
) -> Ticket:
    """As :meth:`Joint.post`. Waits until the tensors are in host memory.

    :param reason: why they can't be mapped.
    :raises UnsupportedOperationError: if the work can't be done on copies.
    """
    if not isinstance(work, Declared):
        raise UnsupportedOperationError(f"{key}: it needs tensors that all processes map, and here {reason}")

    copies = [streams.copy_to_device(tensor, "cpu", stream) for tensor in offer.tensors]
    for _, done in copies:
        streams.host_wait(done)

    hosted = Offer(offer.rank, offer.note, tuple(copy for copy, _ in copies))
    return _HostedTicket(joint.post(key, hosted, work), offer, hosted)


class _HostedTicket(Onward):
    def __init__(self, ticket: FileTicket, offer: Offer, hosted: Offer) -> None:
        super().__init__(ticket)
        self._written, self._offer, self._hosted = ticket.written, offer, hosted
        self._uploading = threading.Lock()
        self._uploaded: list[tuple[Tensor, torch.cuda.Event | None]] | None = None

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> None:
        self._ticket.wait(timeout)
        with self._uploading:
            if self._uploaded is None:
                self._uploaded = [self._upload(number, stream) for number in self._written()]

        for tensor, event in self._uploaded:
            streams.order_after(event, tensor, stream)

    def _upload(self, number: int, stream: torch.cuda.Stream | None) -> tuple[Tensor, torch.cuda.Event | None]:
        tensor = self._offer.tensors[number]
        copy, ready = streams.copy_to_device(self._hosted.tensors[number], tensor.device, stream)
        streams.order_after(ready, copy, stream)
        with torch.cuda.stream(stream), torch.inference_mode(tensor.is_inference()):
            copy_into(tensor, copy)

        return tensor, streams.record(tensor, stream)
