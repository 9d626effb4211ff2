"""ThreadGroupManager: one group for each combination of ranks, made once and shared by all who need it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from dtorch_core._text import rank_list
from dtorch_core.errors import AbortedError
from dtorch_core.group import ThreadGroup, open_group

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store


class ThreadGroupManager:
    """One rank's groups. Thread-safe: threads that ask for one combination at the same time get one group.

    The parameters are those of :func:`dtorch_core.open_group`, for every group that it opens.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        name: str = "manager",
        device: str | torch.device | None = None,
        rendezvous: Store | str | None = None,
        backend: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"ThreadGroupManager: rank {rank} is not one of {world_size} ranks")

        self.rank = rank
        self.world_size = world_size
        self.name = name
        self._options: dict[str, Any] = {
            "device": device,
            "rendezvous": rendezvous,
            "backend": backend,
            "timeout": timeout,
        }
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], Future[ThreadGroup]] = {}
        self._closed = False

    def get(self, ranks: Sequence[int]) -> ThreadGroup:
        """The group of ``ranks``, in that order; opened with them at the first call, then shared.

        :raises ValueError: if this rank is not among them, or one of them is not there, or twice.
        """
        members = tuple(int(rank) for rank in ranks)
        self._check(members)
        with self._lock:
            if self._closed:
                raise AbortedError(f"{self!r} is closed; make a new one")

            future = self._groups.get(members)
            mine = future is None
            if future is None:
                future = self._groups[members] = Future()

        if mine:
            try:
                future.set_result(self._open(members))
            except BaseException as error:
                # Not kept: the next caller tries again.
                with self._lock:
                    self._groups.pop(members, None)

                future.set_exception(error)

        return future.result()

    def groups_for(self, mesh: Any, dim: int | str = 0) -> ThreadGroup:  # noqa: ANN401 - nested ints, tensor, DeviceMesh
        """The group of the ranks that differ from this one in mesh dimension ``dim`` alone.

        :param mesh: ranks as nested ints or an int tensor, or a DeviceMesh.
        :param dim: a number, counted from the end where negative; or a name where the mesh is a DeviceMesh with names.
        :raises TypeError: if ``mesh`` or ``dim`` is something else.
        :raises ValueError: if this rank is not in the mesh, or the mesh has no such dimension.
        """
        from dtorch_core.placement._mesh import Mesh

        what = f"{self!r}: groups_for"
        grid = Mesh.read(mesh, self.world_size, what)
        try:
            line = grid.line(self.rank, dim)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{what}: {error}") from None

        return self.get(line)

    def close(self) -> None:
        """Close every group, in an order that is the same on every rank. May be repeated."""
        with self._lock:
            self._closed = True
            groups = sorted(self._groups.items())
            self._groups = {}

        for _, future in groups:
            if future.exception() is None:
                future.result().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ThreadGroupManager {self.name!r} rank {self.rank} of {self.world_size}>"

    def _check(self, members: tuple[int, ...]) -> None:
        if len(set(members)) != len(members) or not set(members) <= set(range(self.world_size)):
            raise ValueError(f"{self!r}: needs different ranks of 0 to {self.world_size - 1}, not {list(members)}")

        if self.rank not in members:
            raise ValueError(f"{self!r}: this rank is not one of {rank_list(members)}")

    def _open(self, members: tuple[int, ...]) -> ThreadGroup:
        return open_group(
            f"{self.name}/{list(members)}",
            rank=members.index(self.rank),
            world_size=len(members),
            **self._options,
        )
