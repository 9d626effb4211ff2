"""The seven hooks: the map of the product.

A plugin is a module that implements some of them, named by an entry point in the group ``dtorch``. It must not
import torch: the hooks are called to list and to choose, and only the chosen backend's factory is imported.
Every hook of every plugin is called alone; one that raises is reported and stops nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from dtorch_core._selection.reasons import BackendSpec, Kind, Selection, Verdict
    from dtorch_core._selection.topology import Member, Topology

PROJECT = "dtorch"
"""pluggy's project name and the entry-point group."""

API_VERSION = 1
"""The version of this contract. A :class:`BackendSpec` with a higher ``api`` is listed as broken and never imported."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def dtorch_register_tensor_stores() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """Offer TensorStore backends. The factory of each returns a :class:`dtorch_core.TensorStore`."""


@hookspec
def dtorch_register_thread_groups() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """Offer ThreadGroup backends. The factory of each returns a ``torch.distributed.ProcessGroup``."""


@hookspec
def dtorch_register_promises() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """Offer promise backends. The factory of each returns an object with ``create()`` and ``attach(token)``."""


@hookspec
def dtorch_describe_member(member: Member) -> Mapping[str, str]:  # type: ignore[empty-body]
    """Add facts about this rank. They reach every rank's probes as ``member.facts``; keys are ``backend.fact``."""


@hookspec(firstresult=True)
def dtorch_rank_backends(kind: Kind, topology: Topology, verdicts: Sequence[Verdict]) -> Sequence[str] | None:
    """Site policy: the names to use, best first, or None for no opinion. The first result wins.

    The first name whose probe said yes is chosen; names left out are not used.
    """


@hookspec
def dtorch_backend_selected(selection: Selection) -> None:
    """Observe a choice, on every rank, after it was made. Errors are logged and listed, never raised."""


@hookspec
def dtorch_doctor() -> Iterable[str]:  # type: ignore[empty-body]
    """Say in ``dtorch doctor`` what this plugin has on this machine, in lines of text, and remove what was left behind.

    An error that it raises is a problem of the report.
    """
