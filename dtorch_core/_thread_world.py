"""A world of ``torch.distributed`` for each rank that is a thread: all that this touches of torch's private state.

torch keeps one world in a process: the default process group, and what belongs to the groups. While ranks are threads,
what torch asks is answered by the world of the rank whose thread asks, and for all other threads by the process's own.

Names of groups are looked up in one registry of the process, from C++ too. A rank's groups are there under names that
have the rank's own mark, so that no thread can find another rank's group, and other threads find theirs.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from dtorch_core import _rank_libraries, _scope
from dtorch_core._rank_properties import unlocked
from dtorch_core._rank_threads import inherited
from dtorch_core._scope import Scope
from dtorch_core._shared_patch import SharedPatch, lacking, replace
from dtorch_core._when_imported import when_imported
from dtorch_core.errors import UnsupportedOperationError

_KEY = "torch.distributed"
"""Of a rank's world, in ``Scope.own``."""

_MARK = re.compile(r"@rank\d+\.\d+$")
_numbers = itertools.count(1)
_KEPT = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "group_count", "tags_to_pg", "pg_to_tag")
"""What torch's world keeps in variables of its module, and a rank's world in itself."""


@functools.cache
def _world_class() -> type:
    """torch's world, with everything in itself."""

    def kept(name: str) -> property:
        return property(lambda self: self.kept[name], lambda self, value: self.kept.__setitem__(name, value))

    def start(self: Any, rank: int) -> None:  # noqa: ANN401
        distributed_c10d._World.__init__(self)
        self.kept = {name: 0 if name == "group_count" else {} for name in _KEPT}
        self.number = next(_numbers)  # of this world alone, in this process
        self.mark = f"@rank{rank}.{self.number}"
        self.marked = set()  # the names under which its groups are registered
        self.meshes = []  # weak references
        self.tracker = None  # of DTensor's random numbers
        self.handlers = None  # of DTensor's operators

    return type("RankWorld", (distributed_c10d._World,), {"__init__": start, **{name: kept(name) for name in _KEPT}})


def missing() -> list[str]:
    """What this torch does not have as it is expected here; empty where thread ranks can have worlds."""
    found: list[str] = []
    world = getattr(distributed_c10d, "_World", None)
    if world is None or type(getattr(distributed_c10d, "_world", None)) is not world:
        found.append("torch.distributed.distributed_c10d has no _world of class _World")
    else:
        found += [f"_World has no property {name}" for name in _KEPT if not isinstance(vars(world).get(name), property)]
        for name, value in vars(world).items():
            if isinstance(value, property) and name not in _KEPT and _module_state(value.fget.__code__):  # type: ignore[union-attr]
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
        yield


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """This thread, and those it starts, have a world of the rank's own, with no group in it at first."""
    with held():
        _rank_libraries.divide()
        _rank_libraries.enter(scope)
        world = scope.own[_KEY] = _world_class()(scope.rank)
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
            scope.own.pop(_KEY, None)


def mine() -> Any:  # noqa: ANN401 - a class made of torch's
    """This thread's rank's own world; None where there is none."""
    scope = _scope.current()
    return None if scope is None else scope.own.get(_KEY)


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
        if world is not None and not _MARK.search(name):
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
    _patch_meshes(stack)
    _patch_ddp(stack)
    _patch_defaults(stack)


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


def _patch_meshes(stack: ExitStack) -> None:
    """Meshes of different ranks differ: torch keeps what it has worked out for one in caches of the process."""
    mesh_class = device_mesh.DeviceMesh

    def init(self: Any, *args: Any, **named: Any) -> None:  # noqa: ANN401
        world = mine()
        if world is not None and not tensors_ready.is_set():
            _patch.extend(_patch_tensors)

        original_init(self, *args, **named)
        if world is not None:
            self._thread_id, self._hash = world.number, None
            world.meshes.append(weakref.ref(self))

    def set_state(self: Any, state: dict[str, Any]) -> None:  # noqa: ANN401
        world = mine()
        if world is not None and "_dim_group_names" in state:
            names = [None if name is None else _MARK.sub("", name) + world.mark for name in state["_dim_group_names"]]
            state = {**state, "_dim_group_names": names, "_thread_id": world.number, "_hash": None}

        original_set_state(self, state)

    tensors_ready = threading.Event()
    original_init = replace(stack, mesh_class, "__init__", init)
    original_set_state = replace(stack, mesh_class, "__setstate__", set_state)

    def _patch_tensors(stack: ExitStack) -> None:
        if not tensors_ready.is_set():
            tensors_ready.set()
            _patch_dtensor(stack)


def _patch_dtensor(stack: ExitStack) -> None:
    from torch.distributed.tensor import _collective_utils, _dispatch, _random, _redistribute, _sharding_prop

    # To work out the shape of a result is not for several threads at once: they set the device guard of the process.
    propagator, lock = _sharding_prop.ShardingPropagator, threading.RLock()
    if hasattr(propagator, "_fake_mode_lock"):
        replace(stack, propagator, "_fake_mode_lock", lock)
    elif hasattr(propagator, "_propagate_tensor_meta_non_cached"):  # up to torch 2.11

        def propagate(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            with lock:
                return original(*args, **named)

        original = replace(stack, propagator, "_propagate_tensor_meta_non_cached", propagate)

    # What is kept for the meshes of ranks that are gone would keep their groups, and the memory of these.
    for owner, name in (
        (_redistribute, "_gen_transform_infos"),
        (getattr(_collective_utils, "MeshTopoInfo", None), "build_from_mesh"),
        (_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_cached"),
    ):
        clear = getattr(getattr(owner, name, None), "cache_clear", None)
        if clear is not None:
            stack.callback(clear)

    clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear is not None:
        stack.callback(clear)

    _divide_tracker(stack, _random)
    _divide_handlers(stack, _dispatch.OpDispatcher)


def _divide_tracker(stack: ExitStack, module: ModuleType) -> None:
    """DTensor's random numbers on CUDA: making the tracker is collective, so each rank has to make one."""
    if "_rng_tracker" not in vars(module):
        return

    def get(self: ModuleType) -> Any:  # noqa: ANN401
        world = mine()
        return vars(self)["_rng_tracker"] if world is None else world.tracker

    def put(self: ModuleType, value: object) -> None:
        world = mine()
        if world is None:
            vars(self)["_rng_tracker"] = value
        else:
            world.tracker = value

    lock = threading.Lock()

    def manual_seed(*args: Any, **named: Any) -> None:  # noqa: ANN401
        world = mine()
        if world is None:
            original(*args, **named)
            return

        with lock:  # torch's function sees the module's variable alone
            outside = vars(module)["_rng_tracker"]
            vars(module)["_rng_tracker"] = world.tracker
            try:
                original(*args, **named)
            finally:
                world.tracker = vars(module)["_rng_tracker"]
                vars(module)["_rng_tracker"] = outside

    original = replace(stack, module, "manual_seed", manual_seed)
    stack.callback(setattr, module, "__class__", type(module))
    module.__class__ = type("Module", (type(module),), {"_rng_tracker": property(get, put)})


def _divide_handlers(stack: ExitStack, dispatcher: type) -> None:
    """``loss_parallel`` adds handlers to the one dispatcher, and takes them away while other ranks still need them."""
    name = "_custom_op_handlers"

    def get(self: object) -> Any:  # noqa: ANN401
        world = mine()
        if world is None:
            return vars(self)[name]

        if world.handlers is None:
            world.handlers = dict(vars(self)[name])

        return world.handlers

    def put(self: object, value: object) -> None:
        world = mine()
        if world is None:
            vars(self)[name] = value
        else:
            world.handlers = value

    if not hasattr(dispatcher, name):  # an instance's, of one that torch makes once
        stack.callback(delattr, dispatcher, name)
        setattr(dispatcher, name, property(get, put))


def _patch_ddp(stack: ExitStack) -> None:
    """Forward passes set this for torch.compile and put it back, which in threads may leave another rank's module."""
    ddp = torch.nn.parallel.DistributedDataParallel
    if hasattr(ddp, "_active_ddp_module"):
        stack.callback(setattr, ddp, "_active_ddp_module", ddp._active_ddp_module)


_BOUND = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
"""Modules whose functions have the default group of the thread that imports them as a default argument."""

_awaited: set[str] = set()


def _patch_defaults(stack: ExitStack) -> None:
    """These arguments are None: the default group of whoever calls. As where torch is imported before there is one."""
    for name in _BOUND:
        if name in sys.modules:
            _unbind(name, stack)
        elif name not in _awaited:
            _awaited.add(name)
            when_imported(name, functools.partial(_unbind, name))


def _unbind(name: str, stack: ExitStack | None = None) -> None:
    """
    :param stack: restores them; None: they are those of a rank.
    """
    if stack is None:
        _awaited.discard(name)

    module = sys.modules[name]
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for function in {value for owner in owners for value in vars(owner).values() if isinstance(value, FunctionType)}:
        defaults = function.__defaults__ or ()
        if any(isinstance(default, dist.ProcessGroup) for default in defaults):
            if stack is not None:
                stack.callback(setattr, function, "__defaults__", defaults)
            elif mine() is None:
                continue

            function.__defaults__ = tuple(
                None if isinstance(default, dist.ProcessGroup) else default for default in defaults
            )


_patch = SharedPatch(_install)
