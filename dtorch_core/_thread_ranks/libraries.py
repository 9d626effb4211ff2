"""Libraries that keep the state of a program in a dictionary of a class: ranks that are threads have one each.

With that, a library which begins ``torch.distributed`` and notes there who it is serves such ranks as it serves
processes. A class is changed when its module is imported, once; outside of ranks its dictionary is as it was.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

from dtorch_core import _scope
from dtorch_core._scope import Scope
from dtorch_core._thread_ranks.when_imported import when_imported

_KEY = "libraries"
"""Of a rank's dictionaries, in ``Scope.own``."""

_SHARED = {"accelerate.state": ("PartialState", "AcceleratorState", "GradientState")}
"""Classes by module; of Hugging Face's accelerate, by which the Trainer of transformers goes as well."""

_NAME = "_shared_state"

_lock = threading.Lock()
_divided = False


def divide() -> None:
    """From now on, in the whole process."""
    global _divided
    with _lock:
        if _divided:
            return

        _divided = True

    for module, classes in _SHARED.items():
        when_imported(module, partial(_divide, module, classes))


def enter(scope: Scope) -> None:
    """A rank has nothing of this yet, also where the rank that has spawned it has."""
    scope.own[_KEY] = {}


def _divide(module: str, classes: tuple[str, ...]) -> None:
    for name in classes:
        owner = getattr(sys.modules[module], name, None)
        shared = getattr(owner, _NAME, None)
        if type(shared) is dict:  # else the library has its own way
            setattr(owner, _NAME, _OfRank(f"{module}.{name}", shared))


class _OfRank:
    """In the place of a class's dictionary."""

    def __init__(self, name: str, outside: dict[str, Any]) -> None:
        self._name, self._outside = name, outside

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        scope = _scope.current()
        own = None if scope is None else scope.own.get(_KEY)
        if own is None:
            return self._outside

        found: dict[str, Any] = own.setdefault(self._name, {})
        return found

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        shared = self.__get__(instance)
        shared.clear()
        shared.update(value)
