"""What torch keeps in variables of a class, for the process: ranks that are threads have one each.

Whether a profiler of FSDP runs, which wrapper ``enable_wrap`` has named, the plan that a checkpoint has been saved by.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

from dtorch_core import _scope
from dtorch_core._scope import Scope
from dtorch_core._thread_ranks.module_patch import ModulePatch
from dtorch_core._thread_ranks.shared_patch import replace

_KEY = "tables"
"""Of a rank's, in ``Scope.own``."""


def enter(scope: Scope) -> None:
    """A rank has nothing in them yet, also where the rank that has spawned it has."""
    scope.own[_KEY] = {}


def leave(scope: Scope) -> None:
    """It needs them no longer."""
    scope.own.pop(_KEY, None)


def _mine() -> dict[Any, Any] | None:
    scope = _scope.current()
    return None if scope is None else scope.own.get(_KEY)


class _Table:
    """In the place of a container that the class's methods fill and empty."""

    def __init__(self, outside: Any) -> None:  # noqa: ANN401 - a set, a dictionary, or one with a default
        self._outside = outside

    def __get__(self, instance: object, owner: type | None = None) -> Any:  # noqa: ANN401
        own = _mine()
        if own is None:
            return self._outside

        if self not in own:
            own[self] = self._outside.copy()
            own[self].clear()

        return own[self]


class _Apart:
    """In the place of a class whose methods set its variables: passes all on to a copy of it that is the rank's."""

    __slots__ = ("_outside",)

    def __init__(self, outside: type) -> None:
        object.__setattr__(self, "_outside", outside)

    def _class(self) -> Any:  # noqa: ANN401
        own, outside = _mine(), self._outside
        if own is None:
            return outside

        if self not in own:
            contents = {name: value for name, value in vars(outside).items() if name not in ("__dict__", "__weakref__")}
            own[self] = type(outside)(outside.__name__, outside.__bases__, contents)

        return own[self]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._class(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._class(), name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:  # noqa: ANN401
        return self._class()(*args, **named)


def _divide(owner: str, names: tuple[str, ...], module: ModuleType, stack: ExitStack) -> None:
    kind = getattr(module, owner, None)
    for name in names:
        if isinstance(getattr(kind, name, None), (dict, set)):
            replace(stack, kind, name, _Table(getattr(kind, name)))


def _copy(owner: str, module: ModuleType, stack: ExitStack) -> None:
    if isinstance(getattr(module, owner, None), type):
        replace(stack, module, owner, _Apart(getattr(module, owner)))


_PLANS = tuple(f"_cached_{what}" for what in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"))

_CHANGES: dict[str, Callable[[ModuleType, ExitStack], None]] = {
    "torch.distributed.fsdp._debug_utils": partial(_divide, "SimpleProfiler", ("results", "profiling")),
    "torch.distributed.fsdp.wrap": partial(_copy, "_ConfigAutoWrap"),
    "torch.distributed.checkpoint.planner": partial(_divide, "SavePlanner", _PLANS),
}

divided = ModulePatch(_CHANGES)
"""While it is held, ranks have their own."""
