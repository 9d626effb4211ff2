"""A world of ``torch.distributed`` for each rank that is a thread, in the place of torch's one.

torch keeps one world in a process: the default process group, and what belongs to the groups. While ranks are threads,
what torch asks is answered by the world of the rank whose thread asks, and for all other threads by the process's own.

Names of groups are looked up in one registry of the process, from C++ too. A rank's groups are there under names that
have the rank's own mark, so that no thread can find another rank's group, and other threads find theirs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from dtorch_core._scope import Scope
from dtorch_core._thread_ranks import hooks, libraries, tracing
from dtorch_core._thread_ranks import tables as _rank_tables
from dtorch_core._thread_ranks.bound_groups import unbind_defaults
from dtorch_core._thread_ranks.meshes import divide_meshes
from dtorch_core._thread_ranks.properties import unlocked
from dtorch_core._thread_ranks.shared_patch import SharedPatch, lacking, replace
from dtorch_core._thread_ranks.threads import inherited
from dtorch_core._thread_ranks.world import KEPT, KEY, MARK, mine, world_class
from dtorch_core.errors import UnsupportedOperationError


def missing() -> list[str]:
    """What this torch does not have as it is expected here; empty where thread ranks can have worlds."""
    found: list[str] = []
    world = getattr(distributed_c10d, "_World", None)
    if world is None or type(getattr(distributed_c10d, "_world", None)) is not world:
        found.append("torch.distributed.distributed_c10d has no _world of class _World")
    else:
        found += [f"_World has no property {name}" for name in KEPT if not isinstance(vars(world).get(name), property)]
        for name, value in vars(world).items():
            if isinstance(value, property) and name not in KEPT and _module_state(value.fget.__code__):  # type: ignore[union-attr]
                found.append(f"_World.{name} is kept in a variable of the module that is not known here")

    needed: dict[Any, tuple[str, ...]] = {
        distributed_c10d: ("_register_process_group", "_unregister_process_group", "_unregister_all_process_groups"),
        dist.ProcessGroup: ("_set_group_name",),
        device_mesh.DeviceMesh: ("__init__", "__setstate__"),
        torch.autograd: ("set_multithreading_enabled",),
    }
    found += lacking(needed)
    if "_thread_id" not in device_mesh.DeviceMesh.__eq__.__code__.co_names:
        found.append("meshes are not compared by their _thread_id")

    return found


def _module_state(code: CodeType) -> bool:
    """Whether it reads a variable of c10d's module whose value is a program's, not torch's."""
    return any(isinstance(vars(distributed_c10d).get(name), (dict, list, set, int)) for name in code.co_names)


MISSING = missing()


@contextmanager
def held() -> Iterator[None]:
    """Each rank's thread that has a world sees its own in here.

    :raises UnsupportedOperationError: if torch has changed too much.
    """
    if MISSING:
        raise UnsupportedOperationError(
            f"torch.distributed of torch {torch.__version__} can't be divided among ranks that are threads: "
            f"{'; '.join(MISSING)}. Use ranks_as='processes'"
        )

    with inherited.held(), unlocked.held(), _patch.held():
        with _rank_tables.divided.held(), hooks.divided.held(), tracing.divided.held():
            yield


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """This thread, and those it starts, have a world of the rank's own, with no group in it at first."""
    with held():
        libraries.divide()
        libraries.enter(scope)
        _rank_tables.enter(scope)
        world = scope.own[KEY] = world_class()(scope.rank)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            for name in list(world.marked):
                _original["_unregister_process_group"](name)

            # Up to torch 2.11, C++ keeps a thread's meshes when it ends; their groups are not to stay with them.
            for mesh in world.meshes:
                getattr(mesh(), "_pg_registry", {}).clear()

            world.marked.clear()
            world.kept.clear()
            world.default_pg = world.tracker = world.handlers = None
            scope.own.pop(KEY, None)
            _rank_tables.leave(scope)


class _Worlds:
    """What stands in the place of torch's world: passes everything on to the world of the thread that asks."""

    __slots__ = ("_outside",)

    def __init__(self, outside: object) -> None:
        object.__setattr__(self, "_outside", outside)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(mine() or self._outside, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(mine() or self._outside, name, value)


_original: dict[str, Callable[..., Any]] = {}
"""torch's own functions, while others stand in their place."""


def _install(stack: ExitStack) -> None:
    outside = distributed_c10d._world
    outside_names = set(outside.pg_names.values())
    hook, backend = sys.excepthook, distributed_c10d._backend
    stack.callback(_original.clear)
    stack.callback(setattr, distributed_c10d, "_backend", backend)
    stack.callback(_restore_excepthook, hook)
    replace(stack, distributed_c10d, "_world", _Worlds(outside))

    def register(name: Any, group: dist.ProcessGroup) -> None:  # noqa: ANN401 - a type of torch's own for names
        world = mine()
        if world is None:
            outside_names.add(name)
        else:
            name = f"{name}{world.mark}"
            world.marked.add(name)
            group._set_group_name(name)

        _original["_register_process_group"](name, group)

    def unregister(name: Any) -> None:  # noqa: ANN401
        world = mine()
        if world is not None and not MARK.search(name):
            name = f"{name}{world.mark}"

        (outside_names if world is None else world.marked).discard(name)
        _original["_unregister_process_group"](name)

    def unregister_all() -> None:
        world = mine()
        for name in list(outside_names if world is None else world.marked):
            unregister(name)

    for name, function in (
        ("_register_process_group", register),
        ("_unregister_process_group", unregister),
        ("_unregister_all_process_groups", unregister_all),
    ):
        _original[name] = replace(stack, distributed_c10d, name, function)

    if hasattr(torch._C._distributed_c10d, "_set_global_rank"):  # for the process's log lines

        def set_rank(rank: int) -> None:
            if mine() is None:
                _original["_set_global_rank"](rank)

        _original["_set_global_rank"] = replace(stack, torch._C._distributed_c10d, "_set_global_rank", set_rank)

    _settle_device_guard()
    divide_meshes(stack, _patch.extend)
    _patch_ddp(stack)
    unbind_defaults(stack)


def _restore_excepthook(hook: Callable[..., Any]) -> None:
    """``init_process_group`` wraps it, in each rank; what a program has set meanwhile stays."""
    if getattr(sys.excepthook, "__module__", None) == distributed_c10d.__name__:
        sys.excepthook = hook


def _settle_device_guard() -> None:
    """A torch built with CUDA keeps, where there is no GPU, the guard of the first thread that works out a shape.

    Up to torch 2.11 that guard ends with its thread, so this thread should not be a rank.
    """
    lasting = threading.current_thread() is threading.main_thread()
    if lasting and torch.backends.cuda.is_built() and not torch.cuda.is_available():
        getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()


def _patch_ddp(stack: ExitStack) -> None:
    """Forward passes set this for torch.compile and put it back, which in threads may leave another rank's module."""
    ddp = torch.nn.parallel.DistributedDataParallel
    if hasattr(ddp, "_active_ddp_module"):
        stack.callback(setattr, ddp, "_active_ddp_module", ddp._active_ddp_module)


_patch = SharedPatch(_install)
