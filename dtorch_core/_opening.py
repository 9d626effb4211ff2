"""Opens a name on every rank: meet, describe, choose, agree, build. Each step ends alike on every rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from dtorch_core import _member, _scope
from dtorch_core._context import BackendContext
from dtorch_core._meeting import Meeting
from dtorch_core._reasons import BackendSpec, Kind, Selection
from dtorch_core._rendezvous import connect
from dtorch_core._selector import select, spec_of
from dtorch_core._text import describe_error, rank_list
from dtorch_core._topology import Member, Topology
from dtorch_core.errors import DtorchError, NoBackendError, PluginError

if TYPE_CHECKING:
    import torch

    from dtorch_core.store import TensorStore


class Closable(Protocol):
    """What a factory of the kinds "store" and "group" gives, as far as opening it needs to know."""

    def close(self) -> None: ...


def open_backend(
    kind: Kind,
    name: str,
    wrap: Callable[[Any, BackendContext], Closable],
    *,
    rank: int,
    world_size: int,
    device: str | torch.device | None,
    rendezvous: dist.Store | str | None,
    backend: str | None,
    timeout: float,
) -> Any:  # noqa: ANN401 - whatever ``wrap`` gives
    """Meet the other ranks, choose a backend with them, and build this rank's handle.

    ``wrap`` checks what the factory returned and gives the handle. Raises on every rank if it raises on one.
    """
    _check(kind, name, rank, world_size, timeout)
    own_device = _member.normal_device(device)
    carrier, place = connect(rendezvous, rank, world_size, timeout)
    label = f"open_{kind}({name!r}) at {place}"
    meeting = Meeting(carrier, label, f"{kind}/{name}", rank, world_size, timeout)

    described = meeting.exchange("members", _member.describe(rank, own_device).to_dict())
    topology = Topology(Member.from_dict(fields) for fields in described)

    selection = _agree(meeting, label, kind, topology, backend)

    def open_store(store_name: str) -> TensorStore:
        from dtorch_core.store import open_store

        return open_store(
            f"{name}/{store_name}",
            rank=rank,
            world_size=world_size,
            device=own_device,
            rendezvous=dist.PrefixStore("stores/", meeting.store),
            timeout=timeout,
        )

    context = BackendContext(
        kind=kind,
        name=name,
        rank=rank,
        world_size=world_size,
        device=own_device,
        topology=topology,
        rendezvous=dist.PrefixStore("backend/", meeting.store),
        timeout=timeout,
        selection=selection,
        _open_store=open_store,
    )
    handle, error = _built(spec_of(selection), context, wrap)
    failures = _failures(meeting.exchange("ready", {"error": describe_error(error) if error else ""}))
    if error is not None:
        raise error

    assert handle is not None
    if failures:
        handle.close()
        raise DtorchError(
            f"{label}: {rank_list(failures)} could not build the backend {selection.chosen!r}: "
            + "; ".join(f"rank {failed}: {why}" for failed, why in failures.items())
        )

    scope = _scope.current()
    if scope is not None and isinstance(getattr(handle, "abort", None), Callable):  # type: ignore[arg-type]
        scope.add(handle)  # type: ignore[arg-type]

    return handle


def load_factory(spec: BackendSpec) -> Callable[[BackendContext], Any]:
    """Import the chosen backend's factory.

    :raises PluginError: if it can't be imported or is not callable.
    """
    module, _, attribute = spec.factory.partition(":")
    try:
        factory = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"backend {spec.name!r}: its factory {spec.factory} can't be imported: {describe_error(error)}") from error

    if not callable(factory):
        raise PluginError(f"backend {spec.name!r}: its factory {spec.factory} is not callable")

    return factory


def _check(kind: Kind, name: str, rank: int, world_size: int, timeout: float) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"open_{kind}: name must be a non-empty string, not {name!r}")

    for field, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"open_{kind}({name!r}): {field} must be an int, not {value!r}")

    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"open_{kind}({name!r}): rank {rank} is not one of {world_size} ranks (0 to {world_size - 1})")

    if not timeout > 0:
        raise ValueError(f"open_{kind}({name!r}): timeout must be a positive number of seconds, not {timeout!r}")


def _agree(meeting: Meeting, label: str, kind: Kind, topology: Topology, backend: str | None) -> Selection:
    """Choose on every rank alike, or raise on every rank."""
    selection, error = None, None
    try:
        selection = select(kind, topology, backend=backend)
    except DtorchError as refusal:
        error = refusal

    mine = {
        "chosen": selection.chosen if selection else None,
        "asked_by": selection.asked_by if selection else "",
        "error": f"{type(error).__name__}: {error}" if error else "",
    }
    choices = meeting.exchange("choice", mine)
    if error is not None:
        raise error

    if len({choice["chosen"] for choice in choices}) == 1:
        assert selection is not None
        return selection

    lines = [
        f"  rank {rank}: {choice['chosen'] + ' (' + choice['asked_by'] + ')' if choice['chosen'] else choice['error']}"
        for rank, choice in enumerate(choices)
    ]
    raise NoBackendError(
        f"{label}: the ranks do not agree on a {kind} backend:\n"
        + "\n".join(lines)
        + f"\nGive every rank the same backend= argument, environment and plugins (compare: dtorch plugins)."
    )


def _built(
    spec: BackendSpec, context: BackendContext, wrap: Callable[[Any, BackendContext], Closable]
) -> tuple[Closable | None, Exception | None]:
    # Any error has to reach the other ranks before it is raised here: they would wait for this rank otherwise.
    try:
        return wrap(load_factory(spec)(context), context), None
    except Exception as error:
        return None, error


def _failures(ready: list[dict[str, Any]]) -> dict[int, str]:
    return {rank: answer["error"] for rank, answer in enumerate(ready) if answer["error"]}
