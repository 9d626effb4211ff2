"""What a process group may offer besides c10d's methods, and what the core does without it. For authors of groups.

Any group may let its ``abort`` take the reason, as :meth:`Speaks.abort` does: it is then told why, and whether a rank
died. One that has all of :class:`Extras` can declare ``async`` and ``mismatch``, too. Beside a group that torch made,
whose class is torch's own, stands a :class:`Companion`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from dtorch_core import _scope
from dtorch_core.joint import Ticket

Place = AbstractContextManager[None]
"""The collective that is called under it is the second part of the call that it came with."""


class Speaks(Protocol):
    """Carries texts and messages between the ranks, and can end everything with a reason."""

    def post_notes(self, same: str, call: str, text: str) -> tuple[Ticket, Place]:
        """Post a text; the ticket's notes are every rank's, each behind two lines that say what was called.

        :param same: what every rank has to call.
        :param call: how this rank calls it, for people.
        """

    def receive(self, src: int | None, tag: int, buffer: Tensor | None = None) -> Any:  # noqa: ANN401 - a c10d Work
        """A Work whose result is the next message of ``src``, whatever its shape, and that can be cancelled."""

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """c10d's ``abort``: end every call of the group, on every rank, now and later.

        :param reason: what those calls raise, as an AbortedError.
        :param died: this rank failed: they raise PeerLostError.
        """


@runtime_checkable
class Extras(Speaks, Protocol):
    """A group that has these methods also takes tensors of any layout, and compares what the ranks call."""

    def refuse(self, call: str, error: Exception) -> None:
        """Tell the peers, who wait for it, that this rank's call failed before it began."""


class Companion(Speaks, Protocol):
    """Stands beside one rank's handle on a group of torch's own."""

    talks: bool
    """It reaches the other ranks: texts and messages go through it. Otherwise they go over the group."""

    def begin(self, call: str, *, collective: bool) -> int:
        """This rank makes a call: its number, equal on all ranks for a collective.

        :raises DtorchError: if the group is over.
        """

    def begin_alone(self, call: str) -> int | None:
        """As :meth:`begin` of a collective. None where there is more to look at: another call that has to begin first,
        a rank that has left or failed."""

    def turn(self, call: str, ticket: Ticket | None) -> Any:  # noqa: ANN401 - as Notes, see _order
        """When a call may begin that waits for a ticket, or for earlier calls; None: at once."""

    def limited(self, timeout: float) -> AbstractContextManager[None]:
        """What is begun under it may take ``timeout`` seconds, and not the group's own."""

    def launched(self, call: str, number: int, work: Any) -> None:  # noqa: ANN401 - a ForeignWork
        """A collective has been begun, after all with lower numbers.

        :raises DtorchError: if it can't end well.
        """

    def refused(self, call: str, error: Exception, *, exchange: bool, number: int | None) -> None:
        """This rank's call failed before it began. With ``exchange`` the peers wait for its text.

        :param number: the call's; that of the last one where None.
        """

    def send(self, tensor: Tensor, dst: int, tag: int) -> Any:  # noqa: ANN401 - a c10d Work
        """Leave a copy of ``tensor`` for rank ``dst``."""

    def carries(self, peer: int | None) -> bool:
        """Messages from and to this rank go through it, not over the group."""

    def explain(self, call: str, error: Exception) -> Exception:
        """The error to raise where ``call`` raised ``error``, with what is known of the other ranks."""

    def serve_torch(self, group: dist.ProcessGroup) -> None:
        """The group becomes one of ``torch.distributed``, whose calls the companion does not see."""

    def count_split(self) -> int:
        """The number of a split of the group, equal on every rank."""

    def close(self) -> None:
        """End the group's part of this rank, the process group's too.

        :raises DtorchError: if the group had died and nobody has been told yet.
        """


_companions: weakref.WeakKeyDictionary[dist.ProcessGroup, Companion] = weakref.WeakKeyDictionary()


def extras(group: dist.ProcessGroup) -> Extras | None:
    """The group itself if it has them."""
    kind: Any = type(group)
    return cast(Extras, group) if _has_extras(kind) else None


def companion(group: dist.ProcessGroup) -> Companion | None:
    """Who stands beside the group."""
    return _companions.get(group)


def accompany(group: dist.ProcessGroup, beside: Companion) -> None:
    """Let a companion stand beside a group. For the backend that made both, and the stores between its ranks.

    A rank that returns leaves the group through it, before those stores, even if it has forgotten the group.
    """
    _companions[group] = beside
    scope = _scope.current()
    if scope is not None:
        scope.add(beside)


def end(group: dist.ProcessGroup, reason: str, *, died: bool) -> None:
    """Abort a group, which is told why if it lets itself be."""
    kind: Any = type(group)
    if takes_reason(kind):
        cast(Speaks, group).abort(reason, died=died)
    else:
        group.abort()


@cache
def takes_reason(kind: type) -> bool:
    """Its ``abort`` can be called as :meth:`Speaks.abort`; c10d's own can't."""
    try:
        inspect.signature(getattr(kind, "abort", None)).bind(None, "", died=True)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # one that is not written in Python tells nothing of itself
        return False

    return True


def texts_of(ticket: Ticket) -> Sequence[str]:
    """Every rank's text of :meth:`Speaks.post_notes`, in rank order. They are here; raises what the exchange raised."""
    ticket.wait(0)
    return [note.split("\n", 2)[2] for note in ticket.notes()]


def lacking(group: dist.ProcessGroup) -> list[str]:
    """The methods of :class:`Extras` that a group's class has not; its ``abort`` has to take the reason."""
    kind: Any = type(group)
    methods = [name for name in ("post_notes", "receive", "refuse") if not hasattr(kind, name)]
    return methods if takes_reason(kind) else [*methods, "abort"]


@cache  # a check against a protocol takes some microseconds
def _has_extras(kind: type) -> bool:
    return issubclass(kind, Extras) and takes_reason(kind)
