"""Runs a function on every rank of a small world: the ranks are threads of this process, or of some new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from dtorch_core import _scope
from dtorch_core._meeting import member
from dtorch_core._spawn.processes import ProcessRun
from dtorch_core._spawn.rank_context import RankContext
from dtorch_core._spawn.ranks import Run, divided, intra_op
from dtorch_core._spawn.settings import Settings
from dtorch_core._text import count, rank_list, seconds
from dtorch_core.checks import check_timeout
from dtorch_core.errors import (
    AbortedError,
    DtorchError,
    RankFailedError,
    StoreTimeoutError,
    UnsupportedOperationError,
)

__all__ = ["RankContext", "spawn"]


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
    return. A thread can't be killed; one that is busy elsewhere is left behind as a daemon, and named. A process is
    ended. Intra-op threads are divided among all ranks unless OMP_NUM_THREADS is set.

    As processes, the ranks are threads of new interpreters, ``threads_per_process`` in each. ``fn`` and ``args`` are
    pickled, so ``fn`` has to be at a module's level, and the call under ``if __name__ == "__main__":`` in a script.
    Tensors, in ``args`` and in results, travel by value: they arrive on the device that they were on, without their
    autograd graph. Queues, locks and pipes of :mod:`multiprocessing` can be among ``args``. What else is set in this
    process (a default dtype, a seed) is not set in the new ones; :func:`dtorch_core.use_backend` is.

    :param threads_per_process: ranks in each process, in order; the last one may have fewer.
    :param devices: one for all ranks, or one for each; None is the CPU.
    :param timeout: seconds for the whole run, the start of processes included; None is no limit.
    :param torch_distributed: each rank has the default process group of ``torch.distributed``, on the backend that
        fits, so that ``dist.*``, DeviceMesh, DTensor, FSDP2 and DDP work as in processes. docs/run.md says what
        ranks that are threads can't have apart.
    :param rng: "per-rank": torch's default random numbers are drawn as if each rank were a process of its own. A call
        that draws takes about 3 us longer. "shared": the ranks of a process draw from one generator, in any order.
    :raises RankFailedError: if a rank raised; it names the rank and carries its traceback (also as ``__cause__``).
        Also if its process died, or its result can't be pickled.
    :raises StoreTimeoutError: if ranks have not returned within ``timeout``; they are named.
    :raises TypeError: if ``fn`` or ``args`` can't be pickled for other processes.
    :raises ValueError: if ``timeout`` is negative or not finite.
    :raises UnsupportedOperationError: if this torch can't be divided among threads as ``torch_distributed`` and
        ``rng="per-rank"`` need it; the message says what it lacks.
    """
    _check(fn, world_size, args, ranks_as, threads_per_process, rng)
    timeout = None if timeout is None else check_timeout("spawn", timeout)
    places = dict(enumerate(_devices(devices, world_size)))
    shared = ranks_as == "threads" or threads_per_process > 1
    settings = Settings(world_size, torch_distributed, rng == "per-rank", shared)
    return launched(fn, args, places, settings, ranks_as, threads_per_process, timeout)


def launched(
    fn: Callable[..., Any],
    args: Sequence[Any],
    places: dict[int, str],
    settings: Settings,
    ranks_as: str,
    threads_per_process: int = 1,
    timeout: float | None = None,
) -> list[Any]:
    """:func:`spawn`, once its arguments have been read.

    :param places: each rank's device.
    """
    world_size = settings.world_size
    run: Run | ProcessRun
    if ranks_as == "processes":
        run = ProcessRun(fn, tuple(args), places, threads_per_process, settings)
    else:

        def call(scope: _scope.Scope) -> Any:  # noqa: ANN401 - whatever fn returns
            with settings.entered(scope):
                return fn(RankContext(scope.rank, world_size, places[scope.rank], scope), *args)

        run = Run(call, places)

    with ExitStack() as stack:
        if ranks_as == "threads":
            stack.enter_context(settings.held(places.values()))

        return _results(run, world_size, timeout)


def _results(run: Run | ProcessRun, world_size: int, timeout: float | None) -> list[Any]:
    """Start the run, wait for it, and end it."""
    outer = _scope.current()
    if outer is not None:
        outer.add(run)

    own_threads = intra_op.enter()
    try:
        run.start(divided(own_threads, world_size))
        run.wait(timeout)
        if run.failures:
            raise _failure(run)

        if run.stopped is not None:
            run.end(run.stopped)
            raise AbortedError(f"spawn: {run.stopped}{run.left_behind()}")

        if run.unfinished():
            raise _too_late(run, world_size, timeout or 0.0)

        return run.take_results()
    except BaseException as error:
        if not isinstance(error, DtorchError):  # Ctrl-C, or what could not be started
            run.end(f"the run was ended by {type(error).__name__}")

        raise
    finally:
        run.join()
        intra_op.leave(own_threads)


def _check(
    fn: object,
    world_size: int,
    args: object,
    ranks_as: str,
    threads_per_process: int,
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

    if isinstance(threads_per_process, bool) or not isinstance(threads_per_process, int) or threads_per_process < 1:
        raise ValueError(f"spawn: threads_per_process must be an int of at least 1, not {threads_per_process!r}")

    if ranks_as == "threads" and threads_per_process != 1:
        raise UnsupportedOperationError("spawn: threads_per_process is for ranks_as='processes'")


def _devices(devices: str | torch.device | Sequence[str | torch.device] | None, world_size: int) -> list[str]:
    if devices is None or isinstance(devices, (str, torch.device)):
        return [member.normal_device(devices)] * world_size

    if not isinstance(devices, Sequence):
        raise TypeError(f"spawn: devices must be one device for all ranks or a sequence of one each, not {devices!r}")

    if len(devices) != world_size:
        raise ValueError(
            f"spawn: devices names {count(len(devices), 'device')} for {count(world_size, 'rank')}; "
            f"give one, or one each"
        )

    return [member.normal_device(device) for device in devices]


def _failure(run: Run | ProcessRun) -> RankFailedError:
    first = run.first_failure()
    run.end(first.reason, first.rank)
    culprit = run.culprit()
    text = f"\n\n{culprit.traceback}" if culprit.traceback else ""
    failure = RankFailedError(f"{culprit.headline}{run.left_behind()}{text}", culprit.rank)
    failure.__cause__ = culprit.error
    return failure


def _too_late(run: Run | ProcessRun, world_size: int, timeout: float) -> StoreTimeoutError:
    late = f"{rank_list(run.unfinished())} of {world_size} had not returned after {seconds(timeout)}"
    run.end(f"spawn() ended the run: {late}")
    return StoreTimeoutError(f"spawn: {late}{run.left_behind()}")
