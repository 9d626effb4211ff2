"""Hooks for all modules and all optimizers, as ``FlopCounterMode`` sets them: a rank's are called in its threads.

torch keeps them in dictionaries of the process. A rank would count what the others compute, and lose its place in the
tree of its own modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch.nn.modules import module
from torch.optim import optimizer

from dtorch_core import _scope
from dtorch_core._scope import Scope
from dtorch_core._thread_ranks.module_patch import ModulePatch
from dtorch_core._thread_ranks.shared_patch import replace


def _only(scope: Scope, hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        return hook(*args, **named) if _scope.current() is scope else None

    return call


def _of_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register(hook: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401
        scope = _scope.current()
        return original(hook if scope is None else _only(scope, hook), *args, **named)

    return register


_REGISTER = {
    name: _of_ranks(value)
    for name, value in [*vars(module).items(), *vars(optimizer).items()]
    if name.startswith(("register_module_", "register_optimizer_step_")) and name.endswith("_hook")
}
"""The same for good: a module that is imported meanwhile keeps them by their names."""


def _divide(owner: ModuleType, stack: ExitStack) -> None:
    for name, register in _REGISTER.items():
        if name in vars(owner):
            replace(stack, owner, name, register)


_OWNERS = (
    module.__name__,
    optimizer.__name__,
    "torch.utils.module_tracker",
    "torch.distributed._tools.mem_tracker",
    "torch.distributed._tools.mod_tracker",
    "torch.distributed.tensor.debug._comm_mode",
)
"""That of the functions, and those of torch's that know them by their names."""

divided = ModulePatch(dict.fromkeys(_OWNERS, _divide))
"""While it is held, what a rank registers is for the rank."""
