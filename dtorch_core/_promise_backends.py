"""Chooses the backend of a promise, and builds each backend once for this process and device.

A program makes a promise for every request, so a choice is kept until what led to it changes: the plugins, or who
names a backend. No lock is held while a hook, a probe or a factory runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch.distributed as dist

from dtorch_core._context import BackendContext
from dtorch_core._meeting import member as _member
from dtorch_core._meeting.board import Board, Lines
from dtorch_core._meeting.opening import load_factory
from dtorch_core._selection.authority import Ask, asked_for
from dtorch_core._selection.reasons import BackendSpec, Selection
from dtorch_core._selection.registry import Registry, registry
from dtorch_core._selection.selector import explain, refusal, select, spec_of
from dtorch_core._selection.topology import Topology
from dtorch_core._text import seconds
from dtorch_core.errors import NoBackendError, PluginError, ProtocolError, StoreTimeoutError

if TYPE_CHECKING:
    import torch

    from dtorch_core.promise import TensorPromise
    from dtorch_core.store import TensorStore

Reach = Literal["thread", "process", "host"]
"""How far the writer of a promise may be: another thread of this process, another process, another host (reserved)."""

TIMEOUT = 300.0
"""Seconds for a wait that names none."""


class Promises(Protocol):
    """What a promise backend's factory returns."""

    def create(self) -> TensorPromise: ...

    def attach(self, token: bytes, /) -> TensorPromise: ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice, and the backend that it led to."""

    selection: Selection
    capabilities: frozenset[str]
    promises: Promises

    def adopt(self, promise: object) -> TensorPromise:
        """Check what the backend made, and tell it why it was chosen.

        :raises PluginError: if it is no TensorPromise.
        """
        from dtorch_core.promise import TensorPromise

        if not isinstance(promise, TensorPromise):
            raise PluginError(
                f"promise backend {self.selection.chosen!r} made a {type(promise).__name__}, not a TensorPromise"
            )

        promise.selection, promise.capabilities = self.selection, self.capabilities
        return promise


_lock = threading.Lock()
_choices: tuple[Registry | None, dict[object, Chosen]] = None, {}
_built: dict[tuple[int, BackendSpec, str], _Building] = {}


class _Building(Future["Promises"]):
    """A factory at work in one thread; others wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()


def choose(reach: Reach, device: str | torch.device | None, backend: str | None) -> Chosen:
    """The backend for a writer within ``reach``.

    :raises ValueError: if ``reach`` is none of :data:`Reach`.
    :raises NoBackendError: if no backend fits, or the one named does not; with each reason.
    """
    if reach not in get_args(Reach):
        raise ValueError(f"make_promise: reach must be 'thread' or 'process' ('host' is reserved), not {reach!r}")

    own_device = _member.normal_device(device)

    def selected() -> Selection:
        try:
            return select("promise", _topology(reach, own_device), backend=backend)
        except NoBackendError as error:
            raise NoBackendError(f"make_promise(reach={reach!r}): {error}") from error

    return _kept((os.getpid(), reach, own_device, asked_for("promise", backend)), own_device, selected)


def named(backend: str, device: str) -> Chosen:
    """The backend that a token names; it does not have to fit anything else here.

    :raises NoBackendError: if it is not installed.
    :raises PluginError: if it is broken.
    """

    def selected() -> Selection:
        found = explain("promise", _topology("thread", "cpu"), backend=backend)
        if not any(verdict.name == backend and verdict.state in ("yes", "no") for verdict in found.verdicts):
            raise refusal(found, Ask(backend, "the promise's token"))

        return replace(found, chosen=backend, asked_by="the promise's token")

    # The object that made the promise, where this is its process; devices of another process say nothing here.
    spec = next((offer.spec for offer in registry().offers("promise").get(backend, ())), None)
    here = device if (os.getpid(), spec, device) in _built else "cpu"
    return _kept((os.getpid(), "token", here, backend), here, selected)


def _kept(key: object, device: str, selected: Callable[[], Selection]) -> Chosen:
    global _choices
    known = registry()
    with _lock:
        if _choices[0] is not known:
            _choices = known, {}

        kept = _choices[1]
        chosen = kept.get(key)

    if chosen is None:
        selection = selected()
        spec = spec_of(selection)
        chosen = Chosen(selection, spec.capabilities, _build(spec, selection, device))
        with _lock:
            kept[key] = chosen

    return chosen


def _build(spec: BackendSpec, selection: Selection, device: str) -> Promises:
    """The factory's object for this process and device. The first caller makes it; those who come meanwhile wait."""
    key = (os.getpid(), spec, device)
    while True:
        mine = _Building()
        with _lock:
            building = _built.setdefault(key, mine)

        if building is mine:
            try:
                promises = _checked(load_factory(spec)(_context(selection, device)), spec)
            except BaseException:
                with _lock:
                    del _built[key]

                mine.cancel()
                raise

            mine.set_result(promises)
            return promises

        if not building.done() and building.thread == threading.get_ident():
            raise PluginError(f"promise backend {spec.name!r}: its factory {spec.factory} makes promises itself")

        try:
            return building.result(TIMEOUT)
        except TimeoutError:
            raise StoreTimeoutError(
                f"promise backend {spec.name!r}: its factory {spec.factory} has not returned after "
                f"{seconds(TIMEOUT)}, in another thread of pid {os.getpid()}"
            ) from None
        except CancelledError:
            continue  # it failed there; here it raises for this caller


def _topology(reach: str, device: str) -> Topology:
    """This process alone, or with the nearest other one that ``reach`` has to include."""
    member = _member.describe(0, device)
    if reach == "thread":
        return Topology([member])

    host = member.host if reach == "process" else "another host"
    return Topology([member, replace(member, rank=1, host=host, pid=member.pid + 1, thread=member.thread + 1)])


def _context(selection: Selection, device: str) -> BackendContext:
    def no_store(name: str) -> TensorStore:
        raise ProtocolError(f"a promise has no ranks to open the store {name!r} with; a promise brings its own way")

    return BackendContext(
        kind="promise",
        name="promises",
        rank=0,
        world_size=1,
        device=device,
        topology=selection.topology,
        timeout=TIMEOUT,
        selection=selection,
        _board=Board(Lines(dist.HashStore()), "nowhere"),
        _open_store=no_store,
        _exchange=lambda payload: [dict(payload)],
        _failure=lambda _: None,
    )


def _checked(promises: Promises, spec: BackendSpec) -> Promises:
    for method in ("create", "attach"):
        if not callable(getattr(promises, method, None)):
            raise PluginError(
                f"promise backend {spec.name!r}: its factory {spec.factory} returned {type(promises).__name__}, which "
                f"has no {method}()"
            )

    return promises
