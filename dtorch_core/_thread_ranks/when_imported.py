"""Does something as soon as a module is there, without importing it."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_lock = threading.Lock()
_waiting: dict[str, list[Callable[[], None]]] = {}


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` now if the module ``name`` has been imported, else right after its import, in that thread.

    What ``action`` raises then, the import raises.
    """
    with _lock:
        if name not in sys.modules or name in _waiting:
            if not _waiting:
                sys.meta_path.insert(0, _finder)

            _waiting.setdefault(name, []).append(action)
            return

    action()


class _Finder(MetaPathFinder):
    """Finds nothing itself: follows what another finder finds for the modules that are waited for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting or getattr(_finding, "name", None) == name:
            return None

        _finding.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _finding.name = None

        if spec is not None and spec.loader is not None:
            _follow(name, spec.loader)

        return spec


def _follow(name: str, loader: Any) -> None:  # noqa: ANN401 - whatever the other finder uses
    execute = loader.exec_module

    def run(module: ModuleType) -> None:
        execute(module)
        with _lock:
            actions = _waiting.pop(name, [])
            if not _waiting and _finder in sys.meta_path:
                sys.meta_path.remove(_finder)

        for action in actions:
            action()

    loader.exec_module = run


_finder = _Finder()
_finding = threading.local()
"""The name that this thread asks the other finders for."""
