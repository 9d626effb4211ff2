"""Runs a function on every rank of a small world: the ranks are threads of this process."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtorch_core import _member, _scope
from dtorch_core._registry import registry
from dtorch_core._scope import Scope
from dtorch_core._text import rank_list, seconds
from dtorch_core.errors import RankFailedError, StoreTimeoutError, UnsupportedOperationError

if TYPE_CHECKING:
    from dtorch_core.group import ThreadGroup
    from dtorch_core.store import TensorStore

GRACE = 1.0
"""Seconds that the other ranks have to return once one has failed and all their waits were ended."""


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

        :raises ValueError: if ``ranks`` has a rank twice, or one that does not exist.
        """
        from dtorch_core.group import open_group

        members = list(range(self.world_size)) if ranks is None else list(ranks)
        if len(set(members)) != len(members) or not set(members) <= set(range(self.world_size)):
            raise ValueError(f"open_group({name!r}): ranks must be different ones of 0 to {self.world_size - 1}, not {members}")

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


class _Run:
    """One spawn: its threads, their results, and who failed first."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], devices: list[str]) -> None:
        self._fn, self._args, self._devices = fn, args, devices
        rendezvous = dist.HashStore()
        self._scopes = [Scope(rank, rendezvous) for rank in range(len(devices))]
        self._changed = threading.Condition()
        self.results: list[Any] = [None] * len(devices)
        self.pending = set(range(len(devices)))
        self.failed: tuple[int, BaseException] | None = None
        self.threads_per_rank = max(1, torch.get_num_threads() // len(devices))

    def start(self) -> None:
        for rank in sorted(self.pending):
            threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True).start()

    def wait(self, timeout: float | None) -> None:
        """Until all ranks have returned, or one has failed, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self.pending or self.failed is not None, timeout)

    def end(self, reason: str, culprit: int | None) -> None:
        """Wake every rank from every wait of ours, the culprit's peers with its name, and give them time to return."""
        if culprit is not None:
            self._scopes[culprit].abort(reason, died=True)

        for scope in self._scopes:
            scope.abort(reason)

        with self._changed:
            self._changed.wait_for(lambda: not self.pending, GRACE)

    def _rank(self, rank: int) -> None:
        error: BaseException | None = None
        scope = self._scopes[rank]
        _scope.enter(scope)
        try:
            if "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(self.threads_per_rank)

            if self._devices[rank] != "cpu":
                torch.cuda.set_device(self._devices[rank])

            context = RankContext(rank, len(self._devices), self._devices[rank], scope)
            self.results[rank] = self._fn(context, *self._args)
            scope.close()
        except BaseException as failure:  # SystemExit and KeyboardInterrupt in a rank end the run too
            error = failure
        finally:
            _scope.enter(None)
            with self._changed:
                self.pending.discard(rank)
                if error is not None and self.failed is None:
                    self.failed = rank, error

                self._changed.notify_all()


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
    _check(fn, world_size, ranks_as, threads_per_process, torch_distributed, rng)
    run = _Run(fn, tuple(args), _devices(devices, world_size))
    registry()  # once here, rather than in every rank at the same time
    own_threads = torch.get_num_threads()
    try:
        run.start()
        run.wait(timeout)
        if run.failed is not None:
            raise _failure(run, *run.failed)

        if run.pending:
            late = rank_list(run.pending)
            run.end(f"spawn() ended the run after {seconds(timeout or 0)}: {late} had not returned", None)
            raise StoreTimeoutError(
                f"spawn: {late} of {world_size} had not returned after {seconds(timeout or 0)}" + _left_behind(run)
            )
    except KeyboardInterrupt:
        run.end("the run was interrupted", None)
        raise
    finally:
        torch.set_num_threads(own_threads)

    return run.results


def _check(
    fn: object, world_size: int, ranks_as: str, threads_per_process: int, torch_distributed: bool, rng: str
) -> None:
    if not callable(fn):
        raise TypeError(f"spawn: fn must be callable, not {fn!r}")

    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"spawn: world_size must be an int of at least 1, not {world_size!r}")

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
        raise ValueError(f"spawn: devices names {len(devices)} devices for {world_size} ranks; give one, or one each")

    return [_member.normal_device(device) for device in devices]


def _failure(run: _Run, rank: int, error: BaseException) -> RankFailedError:
    run.end(f"rank {rank} failed: {type(error).__name__}: {error}", rank)
    text = "".join(traceback.format_exception(error))
    failure = RankFailedError(
        f"rank {rank} of {len(run.results)} failed with {type(error).__name__}: {error}{_left_behind(run)}\n\n"
        f"Traceback of rank {rank}:\n{text}",
        rank,
    )
    failure.__cause__ = error
    return failure


def _left_behind(run: _Run) -> str:
    if not run.pending:
        return ""

    return (
        f"; {rank_list(run.pending)} did not return within {seconds(GRACE)} and was left behind as a daemon thread "
        f"({', '.join(repr(f'rank {rank}') for rank in sorted(run.pending))})"
    )
