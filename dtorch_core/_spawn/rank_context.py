"""What a rank's function is given by :func:`dtorch_core.spawn`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtorch_core._scope import Scope

if TYPE_CHECKING:
    from dtorch_core.group import ThreadGroup
    from dtorch_core.manager import ThreadGroupManager
    from dtorch_core.store import TensorStore


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank's function is given: who it is, and ways to open what it shares with the others."""

    rank: int
    world_size: int
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    _scope: Scope = field(repr=False, compare=False)

    @property
    def _meeting_place(self) -> Any:  # noqa: ANN401 - a Board, which the core's own openings take as well
        return self._scope.board

    def open_store(self, name: str, *, backend: str | None = None, timeout: float = 300.0) -> TensorStore:
        """Open a TensorStore with all ranks, as :func:`dtorch_core.open_store` does."""
        from dtorch_core.store import open_store

        return open_store(
            name,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            rendezvous=self._meeting_place,
            backend=backend,
            timeout=timeout,
        )

    def open_group(
        self,
        name: str = "world",
        ranks: Sequence[int] | None = None,
        *,
        backend: str | None = None,
        timeout: float = 300.0,
    ) -> ThreadGroup | None:
        """Open a ThreadGroup over ``ranks`` (all where None), in that order; None on a rank that is not among them.

        :raises TypeError: if ``ranks`` is no sequence.
        :raises ValueError: if ``ranks`` is empty, or has a rank twice, or one that does not exist.
        """
        from dtorch_core.group import open_group

        if ranks is not None and (isinstance(ranks, str) or not isinstance(ranks, Iterable)):
            raise TypeError(f"open_group({name!r}): ranks must be a sequence of ranks, not {ranks!r}")

        members = list(range(self.world_size)) if ranks is None else list(ranks)
        if not members or len(set(members)) != len(members) or not set(members) <= set(range(self.world_size)):
            raise ValueError(
                f"open_group({name!r}): ranks must be different ones of 0 to {self.world_size - 1}, at least one, "
                f"not {members}"
            )

        if self.rank not in members:
            return None

        return open_group(
            name if ranks is None else f"{name}{members}",
            rank=members.index(self.rank),
            world_size=len(members),
            device=self.device,
            rendezvous=self._meeting_place,
            backend=backend,
            timeout=timeout,
        )

    def open_manager(
        self, name: str = "manager", *, backend: str | None = None, timeout: float = 300.0
    ) -> ThreadGroupManager:
        """A manager of the groups of any of the ranks, as :class:`dtorch_core.ThreadGroupManager`. Local.

        It opens a group when its ranks first ask for it; ranks whose managers have one name meet.
        """
        from dtorch_core.manager import ThreadGroupManager

        return ThreadGroupManager(
            self.rank,
            self.world_size,
            name=name,
            device=self.device,
            rendezvous=self._meeting_place,
            backend=backend,
            timeout=timeout,
        )
