"""Changes to modules that a program may import or not: made when their module is there, and undone with the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import ModuleType

from dtorch_core._thread_ranks.shared_patch import SharedPatch
from dtorch_core._thread_ranks.when_imported import when_imported


class ModulePatch(SharedPatch):
    """Imports nothing itself.

    :param changes: by module. Each leaves on the stack what undoes it, and leaves alone what this torch does not have.
    """

    def __init__(self, changes: Mapping[str, Callable[[ModuleType, ExitStack], None]]) -> None:
        super().__init__(self._make)
        self._changes = changes
        self._awaited: set[str] = set()

    def _make(self, stack: ExitStack) -> None:
        for name, change in self._changes.items():
            if name in self._awaited:  # also while it is being imported
                continue

            if name in sys.modules:
                change(sys.modules[name], stack)
            else:
                self._awaited.add(name)
                when_imported(name, partial(self._imported, name))

    def _imported(self, name: str) -> None:
        with self._lock:
            self._awaited.discard(name)
            if self._users:
                self._changes[name](sys.modules[name], self._stack)
