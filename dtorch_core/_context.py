"""What a backend's factory is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtorch_core._meeting.board import Board
from dtorch_core._selection.reasons import Kind, Selection
from dtorch_core._selection.selector import spec_of
from dtorch_core._selection.topology import Topology
from dtorch_core.errors import DtorchError, UnsupportedOperationError

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
    timeout: float
    """Seconds that a wait of this handle may take where the call names none."""
    selection: Selection
    """Why this backend was chosen."""
    _board: Board = field(repr=False, compare=False)
    _open_store: Callable[[str], TensorStore] = field(repr=False, compare=False)
    _exchange: Callable[[Mapping[str, Any]], list[dict[str, Any]]] = field(repr=False, compare=False)
    _failure: Callable[[float], DtorchError | None] = field(repr=False, compare=False)
    token: str = ""
    """Letters and digits that are this opening's alone, equal on all of its ranks."""
    label: str = ""
    """How messages call what is opened: ``group 'world'``, also where it is a store that this group's backend opens."""

    @property
    def rendezvous(self) -> Store:
        """A c10d Store that only this opening's ranks see: the place to exchange addresses.

        It connects when it is first asked for. Nothing ends its waits but their timeout: see :meth:`exchange`.
        """
        return self._board.store()

    def exchange(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Give every rank this rank's payload, of JSON values; return all of them in rank order. Collective.

        It ends on every rank, at once, if a rank's factory raises or its process is killed. For factories, once.

        :raises StoreTimeoutError: if a rank has not come in time; it is named.
        :raises PeerLostError: if a rank's process has ended.
        :raises AbortedError: if another rank failed, or this rank's run was ended.
        :raises ProtocolError: the second time, and when the factory has returned.
        """
        return self._exchange(payload)

    def failure(self, seconds: float) -> DtorchError | None:
        """What every rank raises because one of them has failed to open it; None where none does within so long.

        For a factory that finds that another rank is not there any more, and does not know why.
        """
        return self._failure(seconds)

    def open_store(self, name: str) -> TensorStore:
        """Open a TensorStore over the same ranks, chosen by the core. Collective, as :func:`dtorch_core.open_store`.

        :raises UnsupportedOperationError: on every rank, if it lacks what the backend's ``store_needs`` names.
        """
        store = self._open_store(name)
        lacks = spec_of(self.selection).store_lacks(spec_of(store.selection))
        if lacks:
            store.close()
            raise UnsupportedOperationError(
                f"{self.label}, rank {self.rank}: {lacks} (it was decided by {store.selection.asked_by}); use another "
                f"store, or another {self.kind} backend: dtorch explain --kind {self.kind} shows which there are"
            )

        return store
