"""Cached properties of ranks that are threads.

Up to Python 3.11, ``functools.cached_property`` has one lock, which is held while a value is worked out, whatever
object it is of. Where that is collective, as the device of Hugging Face's ``TrainingArguments`` is, whose first use
opens the process group, one rank would hold the lock and wait for another one that waits for the lock.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from dtorch_core import _scope
from dtorch_core._thread_ranks.shared_patch import SharedPatch, replace

_ABSENT = object()


def _install(stack: ExitStack) -> None:
    if not hasattr(functools.cached_property(_install), "lock"):
        return

    def get(self: Any, instance: object, owner: type | None = None) -> Any:  # noqa: ANN401 - as Python's
        known = getattr(instance, "__dict__", None)
        if _scope.current() is None or not isinstance(known, dict) or self.attrname is None:
            return original(self, instance, owner)

        value = known.get(self.attrname, _ABSENT)
        if value is _ABSENT:
            value = known[self.attrname] = self.func(instance)

        return value

    original = replace(stack, functools.cached_property, "__get__", get)


unlocked = SharedPatch(_install)
"""While it is held, a rank's threads work out cached properties without the lock, as all threads do in Python 3.12."""
