"""Settings that a library reads from the environment of the process when it makes something.

They can't be there for that moment alone. The threads of the library read the environment too, whenever they begin
something, and C's getenv() crashes where another thread changes it meanwhile. So they are set before the first object
is made, and stay until the last one is gone.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Environment:
    """Variables that are set while there is anything that was made under them."""

    def __init__(self, settings: Mapping[tuple[str, ...], str]) -> None:
        """
        :param settings: a value, by the names of the variable; one that the user has set, under any of them, stays.
        """
        self._settings = settings
        self._lock = threading.RLock()  # what was made may be collected in here
        self._objects = 0
        self._added: dict[str, str] = {}

    def made(self, make: Callable[[], T], first: Mapping[tuple[str, ...], str] | None = None) -> T:
        """What ``make()`` returns.

        :param first: more settings, for what is read but once: they count where nothing else is there yet.
        """
        self._enter(first or {})
        try:
            made = make()
        except BaseException:
            self._leave()
            raise

        weakref.finalize(made, self._leave).atexit = False
        return made

    def _enter(self, first: Mapping[tuple[str, ...], str]) -> None:
        with self._lock:
            self._objects += 1
            if self._objects == 1:
                self._added = {
                    names[0]: value
                    for names, value in {**self._settings, **first}.items()
                    if not any(name in os.environ for name in names)
                }
                os.environ.update(self._added)

    def _leave(self) -> None:
        with self._lock:
            self._objects -= 1
            if not self._objects:
                for name, value in self._added.items():
                    if os.environ.get(name) == value:  # else the user has set it since
                        os.environ.pop(name, None)
