"""Process groups of an unmodified script: what it asks for by the name of another backend is on one that fits.

This is below ``init_process_group`` and ``new_group``, so that whoever calls them is served: DeviceMesh does as well.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtorch_core import _scope, torch_backends
from dtorch_core._scope import Scope
from dtorch_core._spawn.output import tell
from dtorch_core._thread_ranks.shared_patch import SharedPatch, replace

_KEY = "script"
_STOOD_FOR = {"undefined", "nccl", "nccl-legacy", "nccl2", "nccl-lazy", "gloo", "ucc", "xccl"}
"""Backends of torch's own in whose place another one is put. Since torch 2.14 there are several by NCCL."""

@dataclass
class _Script:
    """Of one rank."""

    backend: str
    world_size: int
    device: str
    openings: Iterator[int] = field(default_factory=itertools.count)
    told: set[str] = field(default_factory=set)
    names: weakref.WeakKeyDictionary[Any, str] = field(default_factory=weakref.WeakKeyDictionary)
    """What ``get_backend`` says of groups that stand for others."""
    default: str | None = None
    """Of the default group; groups that are asked for without a name are of its kind."""

    def stands_for(self, asked: str) -> str:
        """What torch would say of it: what was asked for, ``"undefined"`` where no backend was named.

        On the CPU all backends are Gloo: whoever asks for NCCL and finds it has tensors on a GPU.
        """
        if asked == "undefined" or self.device.startswith("cuda"):
            return asked

        devices = [part.rpartition(":")[:2] for part in asked.split(",")]
        return ",".join(f"{device}{colon}gloo" for device, colon in devices)


def _mine() -> _Script | None:
    scope = _scope.current()
    return None if scope is None else scope.own.get(_KEY)


def _asked(backend: object) -> str | None:
    """The name that the script used, if it is one that is stood for: ``"nccl"``, ``"cpu:gloo,cuda:nccl"``."""
    names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    return str(backend).lower() if names <= _STOOD_FOR else None


def _install(stack: ExitStack) -> None:
    def make(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        script = _mine()
        bound = signature.bind(*args, **named)
        asked = _asked(bound.arguments["backend"])
        is_default = dist.group.WORLD is None
        if script is not None and is_default:
            script.default = None

        if script is None or asked is None or asked == script.backend:
            return original(*args, **named)

        bound.arguments["backend"] = distributed_c10d.Backend(script.backend)
        made = original(*bound.args, **bound.kwargs)
        if isinstance(made[0], dist.ProcessGroup):
            name = script.names[made[0]] = script.stands_for(asked)
            if is_default:
                script.default = name

        _tell(script, asked, made[0])
        return made

    def meet(url: str, *args: Any, **named: Any) -> Iterator[Any]:  # noqa: ANN401
        script, scope = _mine(), _scope.current()
        if script is None or scope is None or not str(url).startswith("env://"):
            yield from original_rendezvous(url, *args, **named)
        else:
            store = dist.PrefixStore(f"env/{next(script.openings)}", scope.rendezvous)
            yield store, scope.rank, script.world_size

    def timeout(backend: Any) -> Any:  # noqa: ANN401
        # NCCL's own would warn where torch has none.
        return original_timeout(distributed_c10d.Backend("gloo") if _mine() and _asked(backend) else backend)

    def backend(group: Any = None) -> Any:  # noqa: ANN401
        # Libraries choose by this name whether they wrap a model in DDP, or which device a message has to be on. Not in
        # distributed_c10d: what torch itself makes of a name there is for groups of its own.
        real = original_backend(group)
        script = _mine()
        if script is None or real != script.backend or real in _STOOD_FOR:
            return real

        name = script.names.get(dist.group.WORLD if group is None else group, script.default)
        return real if name is None else distributed_c10d.Backend(name)

    original = replace(stack, distributed_c10d, "_new_process_group_helper", make)
    signature = inspect.signature(original)
    original_rendezvous = replace(stack, distributed_c10d, "rendezvous", meet)
    original_timeout = replace(stack, distributed_c10d, "_get_default_timeout", timeout)
    original_backend: Any = replace(stack, dist, "get_backend", backend)


def _tell(script: _Script, asked: str, group: Any) -> None:  # noqa: ANN401 - NON_GROUP_MEMBER, too
    """Once for each name, by rank 0."""
    scope = _scope.current()
    if scope is not None and scope.rank == 0 and asked not in script.told and isinstance(group, dist.ProcessGroup):
        script.told.add(asked)
        names = {"undefined": "a process group without naming a backend"}
        used = getattr(group, "getBackendName", group.name)()
        ranks = "1 rank" if script.world_size == 1 else f"{script.world_size} ranks"
        tell(f"dtorch run: the script asks for {names.get(asked, repr(asked))}: {ranks} on {script.device} use {used}")


_patch = SharedPatch(_install)


@contextmanager
def held() -> Iterator[None]:
    """Ranks may run a script in here."""
    with _patch.held():
        yield


@contextmanager
def entered(scope: Scope, world_size: int, backend: str) -> Iterator[None]:
    """What this rank's script opens is on this backend."""
    if backend not in distributed_c10d.Backend.backend_list:
        torch_backends.register(backend)

    with held():
        scope.own[_KEY] = _Script(backend, world_size, scope.device)
        try:
            yield
        finally:
            scope.own.pop(_KEY, None)
