"""Every rank's text to every rank of a process group: how shapes that may differ become known.

A group that can pass texts beside its tensors does so (see :mod:`dtorch_core.extras`); any other one carries
them as bytes in two all_gathers on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core._groups import c10d
from dtorch_core.extras import Place, companion, extras, texts_of
from dtorch_core.joint import Ticket


class Notes:
    """Texts under way."""

    def __init__(self, ticket: Ticket | None, place: Place, texts: Sequence[str] = ()) -> None:
        self.ticket = ticket
        """What is waited for; None where they are here."""
        self._texts = texts
        self.place = place
        """What follows the exchange is called under it."""

    def wait(self, timeout: float) -> None:
        """Until every rank's text is here."""
        if self.ticket is not None:
            self.ticket.wait(timeout)

    def texts(self) -> Sequence[str]:
        """The texts in rank order; once they are here."""
        return self._texts if self.ticket is None else texts_of(self.ticket)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when they are here, or will never be."""
        if self.ticket is None:
            callback()
        else:
            self.ticket.add_done_callback(callback)


def post(group: dist.ProcessGroup, device: str, same: str, call: str, text: str, timeout: float) -> Notes:
    """Begin an exchange; over a group without texts of its own it is over when this returns.

    :param same: what every rank has to call.
    :param call: how this rank calls it.
    """
    own = extras(group)
    if own is not None:
        return Notes(*own.post_notes(same, call, text))

    beside = companion(group)
    if beside is not None and beside.talks:
        return Notes(*beside.post_notes(same, call, text))

    return Notes(None, nullcontext(), _as_bytes(group, device, text, timeout))


def refuse(
    group: dist.ProcessGroup, call: str, error: Exception, *, exchange: bool = False, number: int | None = None
) -> None:
    """Tell the peers, where the group can.

    :param exchange: they wait for this rank's text.
    :param number: the call's, where a companion counts; that of the last call where None.
    """
    own = extras(group)
    if own is not None:
        own.refuse(call, error)
        return

    beside = companion(group)
    if beside is not None:
        beside.refused(call, error, exchange=exchange, number=number)


def _as_bytes(group: dist.ProcessGroup, device: str, text: str, timeout: float) -> list[str]:
    data = text.encode()
    length = torch.tensor([len(data)], device=device)
    sizes = [int(row[0]) for row in _gathered(group, length, timeout)]

    padded = torch.tensor(list(data.ljust(max(1, *sizes))), dtype=torch.uint8, device=device)
    gathered = _gathered(group, padded, timeout)
    return [bytes(row)[:size].decode() for row, size in zip(gathered, sizes, strict=True)]


def _gathered(group: dist.ProcessGroup, tensor: Tensor, timeout: float) -> list[list[int]]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    work: Any = c10d.all_gather(group, parts, tensor, c10d.Terms(timeout))
    work.wait()
    rows = [part.tolist() for part in parts]
    if tensor.is_cuda and companion(group) is not None:
        work.check_end()  # a rank may not have come, and nothing have been written

    return rows
