"""Every rank's text to every rank of a process group: how shapes that may differ become known.

A group that can pass texts beside its tensors says so by having ``post_notes``; any other one carries them as bytes
in two all_gathers on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dtorch_core import _c10d
from dtorch_core.joint import Ticket


@runtime_checkable
class SupportsNotes(Protocol):
    """What a process group may offer besides c10d's methods."""

    def post_notes(self, call: str, text: str) -> Ticket:
        """Post a text; the ticket's notes are every rank's, each behind a line that names the call."""

    def reserve(self) -> AbstractContextManager[None]:
        """Take the next place in the order of calls; the call made under the context has that place."""

    def refuse(self, call: str, error: Exception) -> None:
        """Tell the peers that this rank's next call failed before it began."""

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """c10d's ``abort``, with a reason, and whether this rank died."""


class Notes:
    """Texts under way."""

    def __init__(self, ticket: Ticket | None, texts: Sequence[str] = ()) -> None:
        self._ticket, self._texts = ticket, texts

    def wait(self, timeout: float) -> None:
        """Until every rank's text is here."""
        if self._ticket is not None:
            self._ticket.wait(timeout)

    def texts(self) -> Sequence[str]:
        """The texts in rank order; once they are here."""
        if self._ticket is None:
            return self._texts

        self._ticket.wait(0)  # raises what the exchange raised
        return [note.partition("\n")[2] for note in self._ticket.notes()]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when they are here, or will never be."""
        if self._ticket is None:
            callback()
        else:
            self._ticket.add_done_callback(callback)


def post(group: dist.ProcessGroup, device: str, call: str, text: str, timeout: float) -> Notes:
    """Begin an exchange; over a group without notes of its own it is over when this returns."""
    if isinstance(group, SupportsNotes):
        return Notes(group.post_notes(call, text))

    return Notes(None, _as_bytes(group, device, text, timeout))


def reserve(group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """A place in the order of calls for what follows an exchange."""
    return group.reserve() if isinstance(group, SupportsNotes) else nullcontext()


def refuse(group: dist.ProcessGroup, call: str, error: Exception) -> None:
    """Tell the peers, where the group can."""
    if isinstance(group, SupportsNotes):
        group.refuse(call, error)


def _as_bytes(group: dist.ProcessGroup, device: str, text: str, timeout: float) -> list[str]:
    data = text.encode()
    length = torch.tensor([len(data)], device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    _c10d.all_gather(group, lengths, length, timeout).wait()
    sizes = [int(size) for size in lengths]

    padded = torch.tensor(list(data.ljust(max(sizes))), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(padded) for _ in sizes]
    _c10d.all_gather(group, gathered, padded, timeout).wait()
    return [bytes(t.tolist())[:size].decode() for t, size in zip(gathered, sizes, strict=True)]
