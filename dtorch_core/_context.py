"""What a backend's factory is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtorch_core._reasons import Kind, Selection
from dtorch_core._topology import Topology

if TYPE_CHECKING:
    from torch.distributed import Store

    from dtorch_core.store import TensorStore


@dataclass(frozen=True, slots=True)
class BackendContext:
    """One rank's view of one opening. A factory takes it and returns this rank's handle."""

    kind: Kind
    name: str
    """The name that the ranks opened."""
    rank: int
    world_size: int
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    topology: Topology
    rendezvous: Store
    """A c10d Store that only this opening's ranks see: the place to exchange addresses."""
    timeout: float
    """Seconds that a wait of this handle may take where the call names none."""
    selection: Selection
    """Why this backend was chosen."""
    _open_store: Callable[[str], TensorStore] = field(repr=False, compare=False)
    label: str = ""
    """How messages call what is opened: ``group 'world'``, also where it is a store that this group's backend opens."""

    def open_store(self, name: str) -> TensorStore:
        """Open a TensorStore over the same ranks, chosen by the core. Collective, as :func:`dtorch_core.open_store`."""
        return self._open_store(name)
