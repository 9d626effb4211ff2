"""Runs a function on every rank of a small world: the ranks are threads of this process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dtorch_core import _member, _scope
from dtorch_core._ranks import Run, intra_op
from dtorch_core._registry import registry
from dtorch_core._scope import Scope
from dtorch_core._text import count, rank_list, seconds
from dtorch_core.errors import (
    AbortedError,
    DtorchError,
    RankFailedError,
    StoreTimeoutError,
    UnsupportedOperationError,
)

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

    def open_store(self, name: str, *, backend: str | None = None, timeout: float = 300.0) -> TensorStore:
        """Open a TensorStore with all ranks, as :func:`dtorch_core.open_store` does."""
        from dtorch_core.store import open_store

        return open_store(
            name,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            rendezvous=self._scope.rendezvous,
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
            rendezvous=self._scope.rendezvous,
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
            rendezvous=self._scope.rendezvous,
            backend=backend,
            timeout=timeout,
        )


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    ranks_as: str = "threads",
    threads_per_process: int = 1,
    devices: str | torch.device | Sequence[str | torch.device] | None = None,
    timeout: float | None = None,
    torch_distributed: bool = False,
    rng: str = "shared",
) -> list[Any]:
    """Run ``fn(ctx, *args)`` on every rank and return the results by rank.

    The first rank that fails ends the others: their waits in stores and groups raise, and they have a second to
    return. A thread can't be killed; one that is busy elsewhere is left behind as a daemon, and named.
    Intra-op threads are divided among the ranks unless OMP_NUM_THREADS is set.

    :param devices: one for all ranks, or one for each; None is the CPU.
    :param timeout: seconds for the whole run; None is no limit.
    :raises RankFailedError: if a rank raised; it names the rank and carries its traceback (also as ``__cause__``).
    :raises StoreTimeoutError: if ranks have not returned within ``timeout``; they are named.
    :raises UnsupportedOperationError: for ranks as processes, ``torch_distributed`` and ``rng="per-rank"``.
    """
    _check(fn, world_size, args, ranks_as, threads_per_process, torch_distributed, rng)
    places = _devices(devices, world_size)
    run = Run(lambda scope: fn(RankContext(scope.rank, world_size, places[scope.rank], scope), *args), places)
    registry()  # once here, rather than in every rank at the same time
    outer = _scope.current()
    if outer is not None:
        outer.add(run)

    own_threads = intra_op.enter()
    try:
        run.start(own_threads)
        run.wait(timeout)
        if run.failures:
            raise _failure(run)

        if run.stopped is not None:
            run.end(run.stopped)
            raise AbortedError(f"spawn: {run.stopped}{run.left_behind()}")

        if run.unfinished():
            raise _too_late(run, timeout or 0.0)
    except BaseException as error:
        if not isinstance(error, DtorchError):  # Ctrl-C, or a thread that could not be started
            run.end(f"the run was ended by {type(error).__name__}")

        raise
    finally:
        run.join()
        intra_op.leave(own_threads)

    return run.results


def _check(
    fn: object,
    world_size: int,
    args: object,
    ranks_as: str,
    threads_per_process: int,
    torch_distributed: bool,
    rng: str,
) -> None:
    if not callable(fn):
        raise TypeError(f"spawn: fn must be callable, not {fn!r}")

    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"spawn: world_size must be an int of at least 1, not {world_size!r}")

    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(f"spawn: args must be a sequence of what fn takes after its context, not {args!r}")

    if ranks_as not in ("threads", "processes"):
        raise ValueError(f"spawn: ranks_as must be 'threads' or 'processes', not {ranks_as!r}")

    if rng not in ("shared", "per-rank"):
        raise ValueError(f"spawn: rng must be 'shared' or 'per-rank', not {rng!r}")

    for asked, what in (
        (ranks_as == "processes", "ranks_as='processes' needs a store between processes, and none is released yet"),
        (threads_per_process != 1, "threads_per_process is for ranks_as='processes'"),
        (torch_distributed, "torch_distributed=True is not available yet; open_group() gives a process group"),
        (rng == "per-rank", "rng='per-rank' is not available yet; pass a torch.Generator of the rank's own"),
    ):
        if asked:
            raise UnsupportedOperationError(f"spawn: {what}")


def _devices(devices: str | torch.device | Sequence[str | torch.device] | None, world_size: int) -> list[str]:
    if devices is None or isinstance(devices, (str, torch.device)):
        return [_member.normal_device(devices)] * world_size

    if len(devices) != world_size:
        raise ValueError(
            f"spawn: devices names {count(len(devices), 'device')} for {count(world_size, 'rank')}; "
            f"give one, or one each"
        )

    return [_member.normal_device(device) for device in devices]


def _failure(run: Run) -> RankFailedError:
    rank, error = run.first_failure()
    run.end(f"rank {rank} failed: {type(error).__name__}: {error}", rank)
    rank, error = run.culprit()
    failure = RankFailedError(
        f"rank {rank} of {len(run.results)} failed with {type(error).__name__}: {error}{run.left_behind()}\n\n"
        f"Traceback of rank {rank}:\n{''.join(traceback.format_exception(error))}",
        rank,
    )
    failure.__cause__ = error
    return failure


def _too_late(run: Run, timeout: float) -> StoreTimeoutError:
    late = f"{rank_list(run.unfinished())} of {len(run.results)} had not returned after {seconds(timeout)}"
    run.end(f"spawn() ended the run: {late}")
    return StoreTimeoutError(f"spawn: {late}{run.left_behind()}")
