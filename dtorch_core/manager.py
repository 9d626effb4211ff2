"""ThreadGroupManager: one group for each combination of ranks, made once and shared by all who need it."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dtorch_core import _scope
from dtorch_core._meeting.opening import check_timeout
from dtorch_core._meeting.world import Part, World
from dtorch_core._text import not_copied, rank_list
from dtorch_core.errors import AbortedError
from dtorch_core.group import ThreadGroup, open_group
from dtorch_core.joint import copy_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store


class ThreadGroupManager:
    """One rank's groups. Thread-safe: threads that ask for one combination at the same time get one group.

    The parameters are those of :func:`dtorch_core.open_group`, for every group that it opens. The rendezvous is that of
    all ranks, whichever of them open a group: with ``tcp://`` or ``env://``, rank 0 serves it from here on until its
    process ends.

    :raises DtorchError: if this is rank 0, and it can't serve the rendezvous.
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

        check_timeout(f"ThreadGroupManager {name!r}", timeout)
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self._options: dict[str, Any] = {"device": device, "backend": backend, "timeout": timeout}
        self._scope = _scope.current()
        self._world = World(rendezvous, rank, world_size, timeout)
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], Future[ThreadGroup]] = {}
        self._closed = False

    def get(self, ranks: Sequence[int]) -> ThreadGroup:
        """The group of ``ranks``, in that order; opened with them at the first call, then shared.

        :raises TypeError: if ``ranks`` is not a sequence of ints.
        :raises ValueError: if this rank is not among them, or one of them is not there, or twice.
        """
        try:
            members = tuple(operator.index(rank) for rank in ranks)
        except TypeError:
            raise TypeError(f"{self!r}: get takes a sequence of ranks, as in [0, 2], not {ranks!r}") from None

        self._check(members)
        with self._lock:
            if self._closed:
                raise AbortedError(f"{self!r} is closed; make a new one")

            future = self._groups.get(members)
            first = future is None
            if future is None:
                future = self._groups[members] = Future()

        if first:
            self._fulfil(future, members)

        error = future.exception()
        if error is not None:
            raise error if first else copy_of(error)

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
        """Close every group, in an order that is the same on every rank. May be repeated.

        A group that is still being opened is closed once it is open, and whoever asked for it gets an AbortedError.
        """
        with ExitStack() as closing:  # all of them, also if one raises
            for group in reversed(self._leave()):
                closing.callback(group.close)

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """Abort every group, as :meth:`ThreadGroup.abort`, and make no new one."""
        for group in self._leave():
            group.abort(reason, died=died)
            group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None:
            self.close()
        else:
            # No goodbye: whoever raises out of the block leaves its peers in the middle.
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}", died=True)

    def __reduce__(self) -> NoReturn:
        raise not_copied(self, "with ThreadGroupManager")

    def __repr__(self) -> str:
        return f"<ThreadGroupManager {self.name!r} rank {self.rank} of {self.world_size}>"

    def _check(self, members: tuple[int, ...]) -> None:
        if not members or len(set(members)) != len(members) or not set(members) <= set(range(self.world_size)):
            raise ValueError(
                f"{self!r}: needs different ranks of 0 to {self.world_size - 1}, at least one, not {list(members)}"
            )

        if self.rank not in members:
            raise ValueError(f"{self!r}: this rank is not one of {rank_list(members)}")

    def _leave(self) -> list[ThreadGroup]:
        with self._lock:
            self._closed = True
            groups = sorted(self._groups.items())
            self._groups = {}

        self._world.close()
        done = [future for _, future in groups if future.done()]
        return [future.result() for future in done if future.exception() is None]

    def _fulfil(self, future: Future[ThreadGroup], members: tuple[int, ...]) -> None:
        try:
            group = self._open(members)
        except BaseException as error:
            # Not kept: the next caller tries again.
            with self._lock:
                if self._groups.get(members) is future:
                    del self._groups[members]

            future.set_exception(error)
            return

        with self._lock:
            closed = self._closed
            if not closed:
                future.set_result(group)

        if closed:
            group.close()
            future.set_exception(AbortedError(f"{self!r} was closed while its group {list(members)} was being opened"))

    def _open(self, members: tuple[int, ...]) -> ThreadGroup:
        place: Any = Part(self._world, members, f"the manager {self.name!r}")  # which the core's own openings take, too
        with _scope.within(self._scope):  # whichever thread of the rank asked first
            return open_group(
                f"{self.name}/{list(members)}",
                rank=members.index(self.rank),
                world_size=len(members),
                rendezvous=place,
                **self._options,
            )
