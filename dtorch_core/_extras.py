"""What a process group may offer besides c10d's methods, and what the core does without it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from dtorch_core.joint import Ticket

Place = AbstractContextManager[None]
"""The collective that is called under it is the second part of the call that it came with."""


@runtime_checkable
class Extras(Protocol):
    """A group that has these methods also takes tensors of any layout, and compares what the ranks call."""

    def post_notes(self, same: str, call: str, text: str) -> tuple[Ticket, Place]:
        """Post a text; the ticket's notes are every rank's, each behind two lines that say what was called.

        :param same: what every rank has to call.
        :param call: how this rank calls it, for people.
        """

    def refuse(self, call: str, error: Exception) -> None:
        """Tell the peers, who wait for it, that this rank's call failed before it began."""

    def receive(self, src: int | None, tag: int, buffer: Tensor | None = None) -> Any:  # noqa: ANN401 - a c10d Work
        """A Work whose result is the next message of ``src``, whatever its shape, and that can be cancelled."""

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """c10d's ``abort``, with a reason, and whether this rank died."""


def extras(group: dist.ProcessGroup) -> Extras | None:
    """The group itself if it has them."""
    kind: Any = type(group)
    return cast(Extras, group) if _has_extras(kind) else None


@cache  # a check against a protocol takes some microseconds
def _has_extras(kind: type) -> bool:
    return issubclass(kind, Extras)
