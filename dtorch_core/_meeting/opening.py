"""Opens a name on every rank: meet, describe, choose, agree, build. Each step ends alike on every rank."""

from __future__ import annotations

import hashlib
import importlib
import math
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from dtorch_core import _scope
from dtorch_core._context import BackendContext
from dtorch_core._meeting import hand_made
from dtorch_core._meeting import member as _member
from dtorch_core._meeting.board import Board
from dtorch_core._meeting.meeting import Meeting
from dtorch_core._meeting.rendezvous import connect
from dtorch_core._meeting.world import Part
from dtorch_core._selection.authority import asked_for
from dtorch_core._selection.discovery import guarded
from dtorch_core._selection.reasons import BackendSpec, Kind, Selection
from dtorch_core._selection.selector import announce, choose, spec_of
from dtorch_core._selection.topology import Member, Topology
from dtorch_core._text import count, describe_error
from dtorch_core.checks import LONGEST
from dtorch_core.errors import DtorchError, NoBackendError, PluginError, ProtocolError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from dtorch_core.store import TensorStore


class Closable(Protocol):
    """What a factory of the kinds "store" and "group" gives, as far as opening it needs to know."""

    def close(self) -> None: ...


LONGEST_NAME = 200
"""Characters of a name in the keys of a rendezvous. The server of a TCPStore hangs up where a key has thousands."""

_boards: weakref.WeakKeyDictionary[Closable, Board] = weakref.WeakKeyDictionary()
"""Where each open handle was opened: what is opened there next has the same connections."""

Wrap = Callable[[Any, BackendContext], Closable]
"""Checks what a factory returned, and gives the handle."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank asks for."""

    kind: Kind
    name: str
    wrap: Wrap
    member: Member
    """Where this rank is."""
    world_size: int
    backend: str | None
    timeout: float
    label: str
    """How messages call the opening."""
    shown: str = ""
    """How messages call what is opened, where that is not its own kind and name."""
    opener: str = ""
    """The backend whose factory asked for this opening, as messages call it."""
    known: Topology | None = None
    """Where the ranks are, if they have met before: the end of one is seen from the start."""


def open_backend(
    kind: Kind,
    name: str,
    wrap: Wrap,
    *,
    rank: int,
    world_size: int,
    device: str | torch.device | None,
    rendezvous: Part | Board | dist.Store | str | None,
    backend: str | None,
    timeout: float,
    known: Topology | None = None,
) -> Any:  # noqa: ANN401 - whatever ``wrap`` gives
    """Meet the other ranks, choose a backend with them, and build this rank's handle.

    Raises on every rank if it raises on one.
    """
    _check(kind, name, rank, world_size, timeout)
    timeout = min(timeout, LONGEST)
    # What is wrong with this rank alone is found before it meets anybody: for the others it has not come.
    member = _member.describe(rank, _member.normal_device(device))
    asked_for(kind, backend)
    started = time.monotonic()
    if isinstance(rendezvous, Part):
        carrier, told = rendezvous.reach(timeout), rendezvous.told
    else:
        carrier, told = connect(rendezvous, rank, world_size, timeout), ""

    label = f"open_{kind}({name!r}) at {carrier.place}"
    with _ranks_told(told):
        meeting = Meeting(carrier, label, _path(kind, name), rank, world_size, timeout, started)
        return _open(Request(kind, name, wrap, member, world_size, backend, timeout, label, known=known), meeting)


@contextmanager
def _ranks_told(which: str) -> Iterator[None]:
    """Errors that come out of here say ``which`` ranks they speak of."""
    try:
        yield
    except DtorchError as error:
        if not which:
            raise

        raise _with(error, which) from error.__cause__


def _with(error: DtorchError, more: str) -> DtorchError:
    try:
        return type(error)(f"{error} ({more})").with_traceback(error.__traceback__)
    except Exception:  # a plugin's own class, which is made of something else
        error.add_note(more)
        return error


def _open(request: Request, meeting: Meeting, *, outermost: bool = True) -> Any:  # noqa: ANN401 - whatever ``wrap`` gives
    # What raises in here on one rank ends the meeting's steps on all of them.
    with meeting:
        if outermost and request.known is not None:
            meeting.watch(request.known)

        topology = _meet(request, meeting)
        if outermost and request.known is None:
            meeting.watch(topology)

        selection, token = _agree(request, meeting, topology)
        context = BackendContext(
            kind=request.kind,
            name=request.name,
            rank=request.member.rank,
            world_size=request.world_size,
            device=request.member.device,
            topology=topology,
            timeout=request.timeout,
            selection=selection,
            _board=meeting.store.under("backend"),
            _open_store=lambda name: _open_nested(request, meeting, selection, name),
            _exchange=meeting.exchange_of_backend,
            _failure=meeting.failure,
            token=token,
            label=request.shown or f"{request.kind} {request.name!r}",
        )
        handle = _built(spec_of(selection), context, request.wrap)
        try:
            meeting.exchange("ready", {})
        except BaseException:
            guarded(handle.close)
            raise

    if callable(getattr(handle, "abort", None)):
        scope = _scope.current()
        (hand_made.watch if scope is None else scope.add)(handle)  # type: ignore[arg-type]
        _boards[handle] = context._board

    return handle


def _open_nested(outer: Request, meeting: Meeting, selection: Selection, name: str) -> TensorStore:
    """A store over the same ranks, which is given up with the opening that it is for."""
    from dtorch_core.store import _checked_store

    full = f"{outer.name}/{name}"
    label = f"open_store({full!r}) inside {outer.label}"
    nested = Meeting(
        meeting.store,
        label,
        _path("store", name),
        outer.member.rank,
        outer.world_size,
        outer.timeout,
        time.monotonic(),
        parent=meeting,
    )
    opener = f"{outer.kind} {outer.name!r} ({selection.chosen})"
    shown = outer.shown or f"{outer.kind} {outer.name!r}"
    request = replace(
        outer, kind="store", name=full, wrap=_checked_store, backend=None, label=label, shown=shown, opener=opener
    )
    store: TensorStore = _open(request, nested, outermost=False)
    return store


def load_factory(spec: BackendSpec) -> Callable[[BackendContext], Any]:
    """Import the chosen backend's factory.

    :raises PluginError: if it can't be imported, whatever the reason, or is not callable.
    """
    module, _, attribute = spec.factory.partition(":")
    try:
        factory = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except Exception as error:
        raise PluginError(
            f"backend {spec.name!r}: its factory {spec.factory} can't be imported: {describe_error(error)}"
        ) from error

    if not callable(factory):
        raise PluginError(f"backend {spec.name!r}: its factory {spec.factory} is not callable")

    return factory


def _path(kind: Kind, name: str) -> str:
    quoted = quote(name, safe="", errors="surrogatepass")  # a slash in a name must not lead to another name's keys
    if len(quoted) > LONGEST_NAME:
        quoted = f"sha256 {hashlib.sha256(quoted.encode()).hexdigest()}"  # a space is no part of a quoted name

    return f"{kind}/{quoted}"


def _check(kind: Kind, name: str, rank: int, world_size: int, timeout: float) -> None:
    call = f"open_{kind}({name!r})"
    if not isinstance(name, str) or not name:
        raise ValueError(f"{call}: name must be a non-empty string")

    for field, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{call}: {field} must be an int, not {value!r}")

    if world_size < 1:
        raise ValueError(f"{call}: world_size must be at least 1, not {world_size}")

    if not 0 <= rank < world_size:
        raise ValueError(f"{call}: rank {rank} is not one of {count(world_size, 'rank')} (0 to {world_size - 1})")

    check_timeout(call, timeout)


def check_timeout(call: str, timeout: float) -> None:
    """The rule for an opening's; ``call`` opens the message."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"{call}: timeout must be a finite number of seconds, above 0, not {timeout!r}")


def _meet(request: Request, meeting: Meeting) -> Topology:
    described = meeting.exchange("members", request.member.to_dict())
    try:
        return Topology(Member.from_dict(fields) for fields in described)
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"{request.label}: a rank describes itself in a way that this dtorch-core can't read ({error}); "
            f"install the same version for every rank"
        ) from error


def _agree(request: Request, meeting: Meeting, topology: Topology) -> tuple[Selection, str]:
    """Choose on every rank alike, or raise on every rank; and a token that is the opening's alone."""
    selection, error = choose(request.kind, topology, backend=request.backend)
    said = f"{selection.chosen} (decided by {selection.asked_by})" if error is None else str(error)
    choices = meeting.exchange("choice", {"chosen": selection.chosen, "said": said, "token": uuid.uuid4().hex})
    if len({choice["chosen"] for choice in choices}) > 1:
        lines = [f"  rank {rank}: {choice['said']}" for rank, choice in enumerate(choices)]
        disagreement = (
            f"{request.label}: the ranks do not agree on a {request.kind} backend:\n"
            + "\n".join(lines)
            + "\nGive every rank the same backend= argument, environment and plugins (compare: dtorch plugins)."
        )
        # A rank that could not choose keeps the class of its own error.
        raise (NoBackendError if error is None else type(error))(disagreement) from error

    if error is not None:
        if request.opener:
            raise type(error)(f"the {request.opener} asked for a store over its ranks: {error}") from error

        raise error

    announce(selection)
    return selection, choices[0]["token"]


def _built(spec: BackendSpec, context: BackendContext, wrap: Wrap) -> Closable:
    try:
        return wrap(load_factory(spec)(context), context)
    except SystemExit as error:
        raise PluginError(
            f"backend {spec.name!r}: its factory {spec.factory} called sys.exit({error.code!r})"
        ) from error
