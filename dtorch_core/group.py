"""ThreadGroup: collectives with fresh results, over any c10d process group.

The process group is the backend's. What is built on it here, once: results of their own, shards of different sizes,
checks of the arguments, and Works that carry what the blocking call returns. The collectives are in
:mod:`dtorch_core._groups`: ``reductions`` and ``moves``; ``messages`` go from one rank to one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist

from dtorch_core import _scope
from dtorch_core._context import BackendContext
from dtorch_core._groups import c10d
from dtorch_core._groups.foreign_work import Over
from dtorch_core._groups.group_calls import Prepared
from dtorch_core._groups.messages import Messages
from dtorch_core._groups.moves import Moves
from dtorch_core._groups.reductions import Reductions
from dtorch_core._meeting.opening import open_backend
from dtorch_core._selection.topology import Topology
from dtorch_core._text import not_copied
from dtorch_core.errors import PluginError
from dtorch_core.extras import end, extras

if TYPE_CHECKING:
    from torch.distributed import Store


class ThreadGroup(Reductions, Moves, Messages):
    """One rank's handle on a group of ranks. Inputs are never changed, unless ``out`` is the input itself.

    Every collective takes ``timeout`` (seconds; None is the group's, and less than a millisecond is one) and
    ``async_op=True``, which returns a :class:`Work` that carries what the blocking call returns; those with a tensor
    result take ``out``, memory for it.
    Each raises, on every rank:

    :class:`CollectiveMismatchError` if the ranks' calls do not fit each other; the group stays usable;
    :class:`StoreTimeoutError` if ranks have not come in time; later calls raise :class:`AbortedError`;
    :class:`PeerLostError` if a rank died or left.
    """

    def __init__(self, process_group: dist.ProcessGroup, ctx: BackendContext) -> None:
        super().__init__(process_group, ctx)
        self._board, self._topology = ctx._board, ctx.topology
        self._scope = _scope.current()
        self._splits = itertools.count()
        self._closed = False

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:  # noqa: ANN401
        """Wait until every rank is here. On CUDA this is about the ranks, not about the work they have queued."""
        if self._beside is None or not self._beside.talks:
            return self._run("barrier", self._barrier, timeout, async_op)

        return self._exchange("barrier", "barrier", lambda: "", lambda _: self._barrier(), timeout, async_op)

    def split(self, ranks: Sequence[int], *, timeout: float | None = None) -> ThreadGroup | None:
        """A new group of some ranks; rank i of it is ``ranks[i]``. None on the others. All ranks of this group call it.

        :raises ValueError: if ``ranks`` names a rank twice, or one that is not here.
        """
        members = list(ranks) if isinstance(ranks, Iterable) else []
        call, number = f"split({members if isinstance(ranks, Iterable) else ranks!r})", next(self._splits)

        def tell() -> str:
            self._need("split", call)
            for rank in members:
                self._check_rank(call, rank)

            if not members or len(set(members)) != len(members):
                raise ValueError(f"{self._label(call)}: needs ranks, each once")

            return ""

        self._exchange(call, call, tell, lambda _: self._barrier(), timeout, async_op=False)
        if self.rank not in members:
            return None

        with _scope.within(self._scope):  # whichever thread of the rank asked
            group: ThreadGroup = open_backend(
                "group",
                f"{self.name}/{number}{members}",
                _wrapped,
                rank=members.index(self.rank),
                world_size=len(members),
                device=self.device,
                rendezvous=self._board.under("split"),
                backend=self.backend if self.selection.asked_by == "argument" else None,
                timeout=self.timeout,
                known=Topology(replace(self._topology[rank], rank=index) for index, rank in enumerate(members)),
            )
            return group

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """Wake every rank from every call of this group, now and later, with :class:`AbortedError`.

        :param died: this rank failed; its peers see :class:`PeerLostError`.
        """
        own = extras(self.process_group) or self._beside
        if own is not None:
            own.abort(reason, died=died)
        else:
            end(self.process_group, reason or f"rank {self.rank} aborted the group {self.name!r}", died=died)

    def close(self) -> None:
        """Leave. Local, and may be repeated.

        :raises DtorchError: if results were under way on a GPU that will never be right, and no call has said so.
        """
        if not self._closed:
            self._closed = True
            (self.process_group.shutdown if self._beside is None else self._beside.close)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            # No goodbye: whoever raises out of the block leaves its peers in the middle.
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}", died=True)

        self.close()

    def __reduce__(self) -> NoReturn:
        raise not_copied(self, "with open_group")

    def __repr__(self) -> str:
        return f"<ThreadGroup {self.name!r} ({self.backend}) rank {self.rank} of {self.world_size} on {self.device}>"

    def _barrier(self) -> Prepared[None]:
        if self._beside is not None and self._beside.talks:
            return lambda s: Over(), lambda: None  # type: ignore[return-value]  # it has what is used of a Work

        return lambda s: c10d.barrier(self.process_group, s), lambda: None


def open_group(
    name: str,
    *,
    rank: int,
    world_size: int,
    device: str | torch.device | None = None,
    rendezvous: Store | str | None = None,
    backend: str | None = None,
    timeout: float = 300.0,
) -> ThreadGroup:
    """Open a ThreadGroup with the other ranks, on the backend that fits where they are. Collective.

    The parameters and errors are those of :func:`dtorch_core.open_store`.
    """
    group: ThreadGroup = open_backend(
        "group",
        name,
        _wrapped,
        rank=rank,
        world_size=world_size,
        device=device,
        rendezvous=rendezvous,
        backend=backend,
        timeout=timeout,
    )
    return group


def _wrapped(process_group: Any, ctx: BackendContext) -> ThreadGroup:  # noqa: ANN401 - from a plugin
    return ThreadGroup(_checked_process_group(process_group, ctx), ctx)


def _checked_process_group(process_group: Any, ctx: BackendContext) -> dist.ProcessGroup:  # noqa: ANN401
    if not isinstance(process_group, dist.ProcessGroup):
        raise PluginError(
            f"group backend {ctx.selection.chosen!r}: its factory returned {type(process_group).__name__}, "
            f"not a torch.distributed.ProcessGroup"
        )

    return process_group
