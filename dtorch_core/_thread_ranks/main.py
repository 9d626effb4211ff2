"""A ``__main__`` of a rank's own: the namespace in which it runs a script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from dtorch_core import _scope
from dtorch_core._scope import Scope
from dtorch_core._thread_ranks.shared_patch import SharedPatch

_KEY = "__main__"


class _MainOfEach(ModuleType):
    """What ``sys.modules["__main__"]`` is meanwhile: to each rank its own. Pickled classes are found through it."""

    def __init__(self, outside: ModuleType) -> None:
        super().__init__("__main__")
        ModuleType.__setattr__(self, "_outside", outside)

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(_of(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_of(self), name)

    def __dir__(self) -> list[str]:
        return dir(_of(self))


def _of(module: _MainOfEach) -> ModuleType:
    scope = _scope.current()
    own = None if scope is None else scope.own.get(_KEY)
    outside: ModuleType = ModuleType.__getattribute__(module, "_outside")
    return own or outside


def _install(stack: ExitStack) -> None:
    outside = sys.modules["__main__"]
    stack.callback(sys.modules.__setitem__, "__main__", outside)
    sys.modules["__main__"] = _MainOfEach(outside)


_patch = SharedPatch(_install)


@contextmanager
def held() -> Iterator[None]:
    """Ranks may have a ``__main__`` of their own in here."""
    with _patch.held():
        yield


@contextmanager
def entered(scope: Scope) -> Iterator[ModuleType]:
    """The rank's own ``__main__``, with nothing in it yet."""
    with held():
        module = scope.own[_KEY] = ModuleType("__main__")
        try:
            yield module
        finally:
            scope.own.pop(_KEY, None)
