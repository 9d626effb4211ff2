"""Default arguments that are the default group of the thread that imported their function: None, for each caller's."""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from types import FunctionType

import torch.distributed as dist

from dtorch_core._thread_ranks.when_imported import when_imported
from dtorch_core._thread_ranks.world import mine

_BOUND = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
"""Modules whose functions have the default group of the thread that imports them as a default argument."""

_awaited: set[str] = set()


def unbind_defaults(stack: ExitStack) -> None:
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
