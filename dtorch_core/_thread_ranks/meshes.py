"""Meshes and DTensors of ranks that are threads: what torch keeps of them for the process is each rank's own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch.distributed import device_mesh

from dtorch_core._thread_ranks.shared_patch import replace
from dtorch_core._thread_ranks.world import MARK, mine


def divide_meshes(stack: ExitStack, extend: Callable[[Callable[[ExitStack], None]], None]) -> None:
    """Meshes of different ranks differ: torch keeps what it has worked out for one in caches of the process.

    :param extend: makes more changes, which are undone with these: those to DTensor wait for the first mesh of a rank.
    """
    mesh_class = device_mesh.DeviceMesh

    def init(self: Any, *args: Any, **named: Any) -> None:  # noqa: ANN401
        world = mine()
        if world is not None and not tensors_ready.is_set():
            extend(patch_tensors)

        original_init(self, *args, **named)
        if world is not None:
            self._thread_id, self._hash = world.number, None
            world.meshes.append(weakref.ref(self))

    def set_state(self: Any, state: dict[str, Any]) -> None:  # noqa: ANN401
        world = mine()
        if world is not None and "_dim_group_names" in state:
            names = [None if name is None else MARK.sub("", name) + world.mark for name in state["_dim_group_names"]]
            state = {**state, "_dim_group_names": names, "_thread_id": world.number, "_hash": None}

        original_set_state(self, state)

    tensors_ready = threading.Event()
    original_init = replace(stack, mesh_class, "__init__", init)
    original_set_state = replace(stack, mesh_class, "__setstate__", set_state)

    def patch_tensors(stack: ExitStack) -> None:
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
