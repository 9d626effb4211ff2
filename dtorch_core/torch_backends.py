"""Group backends under their names in ``torch.distributed``: ``dist.init_process_group("samedevice")``.

A distribution with a group backend calls :func:`register` when it is imported. torch 2.14 finds it without an import,
through the entry-point group ``torch.distributed.backends``, whose values are functions that register.

Importing this imports no torch.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from dtorch_core._thread_ranks.when_imported import when_imported

if TYPE_CHECKING:
    import torch.distributed as dist

    from dtorch_core._context import BackendContext

ANY = "dtorch"
"""The name under which the selector chooses by topology."""

DEVICES = ("cpu", "cuda")
_HOME = "torch.distributed.distributed_c10d"
_lock = threading.Lock()
_asked: set[str] = set()


def register(name: str) -> None:
    """Offer the group backend ``name`` in ``torch.distributed``, and :data:`ANY`; at once, or when torch is imported.

    May be repeated. The backend itself is looked for when a process group is made.
    """
    for each in (ANY, name):
        with _lock:
            first = each not in _asked
            _asked.add(each)

        if first:
            when_imported(_HOME, lambda each=each: _register(each))  # type: ignore[misc]


def register_any() -> None:
    """Offer :data:`ANY`: the entry point of this distribution."""
    register(ANY)


def _register(name: str) -> None:
    from torch.distributed import distributed_c10d

    from dtorch_core._groups import torch_state

    def create(opts: Any, pg_options: Any = None) -> dist.ProcessGroup:  # noqa: ANN401 - c10d's, untyped
        return _opened(name, opts)

    distributed_c10d.Backend.register_backend(name, create, extended_api=True, devices=[*DEVICES])
    torch_state.adapt()


def _opened(name: str, opts: Any) -> dist.ProcessGroup:  # noqa: ANN401
    """c10d's creator: the ranks meet through the store that it brings."""
    from dtorch_core._groups import sharded_tensors
    from dtorch_core._groups import torch_kernels as _torch_kernels
    from dtorch_core._meeting.opening import open_backend
    from dtorch_core.extras import companion

    _torch_kernels.serve(DEVICES)
    sharded_tensors.adapt()
    _reach(opts.store, opts.group_id)
    chosen = open_backend(
        "group",
        opts.group_id,
        _Handle,
        rank=opts.group_rank,
        world_size=opts.group_size,
        device=_own_device(name, opts),
        rendezvous=opts.store,
        backend=None if name == ANY else name,
        timeout=opts.timeout.total_seconds(),
    )
    group: dist.ProcessGroup = chosen.process_group
    beside = companion(group)
    if beside is not None:
        beside.serve_torch(group)

    return group


def _reach(store: dist.Store, name: str) -> None:
    """See whether the store is there at all: a new connection to a server that is gone is tried for its whole timeout.

    :raises PeerLostError: if it is gone.
    """
    import torch.distributed as dist

    from dtorch_core._meeting.board import reach
    from dtorch_core.errors import PeerLostError

    try:
        reach(store)
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"process group {name!r}: the store of torch.distributed is gone ({str(error).splitlines()[0]}); has the "
            f"process that serves it ended?"
        ) from error


class _Handle:
    """What opening needs of a group until it is c10d's. Wakes it when its rank fails."""

    def __init__(self, process_group: Any, ctx: BackendContext) -> None:  # noqa: ANN401 - from a plugin
        from dtorch_core.group import _checked_process_group

        self.process_group = _checked_process_group(process_group, ctx)
        self.rank = ctx.rank

    def close(self) -> None:
        self.process_group.shutdown()


def _own_device(name: str, opts: Any) -> str:  # noqa: ANN401
    """The device of this rank.

    The one given to ``init_process_group``, which c10d tells since torch 2.14. Of a rank of :func:`dtorch_core.spawn`,
    what it was given. Else a GPU if there is one: the thread's current one if CUDA has begun, or, where the selector
    has to choose, the one that a torchrun script of one rank a GPU would take.
    """
    import torch

    from dtorch_core import _scope

    bound = getattr(getattr(opts, "process_group", None), "bound_device_id", None)
    if bound is not None:
        return str(bound)

    scope = _scope.current()
    if scope is not None:
        return scope.device

    if not torch.cuda.is_available():
        return "cpu"

    if torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"

    local_rank = os.environ.get("LOCAL_RANK", "") if name == ANY else ""
    return f"cuda:{int(local_rank) % torch.cuda.device_count() if local_rank.isdecimal() else 0}"
