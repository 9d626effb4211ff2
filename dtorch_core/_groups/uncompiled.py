"""Packages and modules whose code torch.compile runs as it is.

A frame that begins while compiled code runs is compiled as well: where DDP broadcasts buffers between two compiled
parts, torch's C++ calls a process group of Python. What is in there, locks, threads and memory of other ranks, is
nothing to trace.
"""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from functools import partial

from dtorch_core._thread_ranks.when_imported import when_imported
from dtorch_core.store import TensorStore

_RULES = "torch._dynamo.trace_rules"

_lock = threading.Lock()
_known: set[str] = set()


def leave_uncompiled(*names: str) -> None:
    """From now on, in the whole process. torch's compiler is not imported for it."""
    for name in names:
        with _lock:
            if name in _known:
                continue

            _known.add(name)

        when_imported(_RULES, partial(_skip, name))


def code_of(store: type[TensorStore]) -> list[str]:
    """Where its code is: its module and those of the stores that it is derived from; of a plugin the whole package.

    The package of any other store may have models in it, which are to be compiled. So may the program itself.
    """
    modules = [kind.__module__ for kind in store.__mro__ if issubclass(kind, TensorStore)]
    names = (name.partition(".")[0] if name.startswith("dtorch_") else name for name in modules)
    return [name for name in dict.fromkeys(names) if name != "__main__"]


def _skip(name: str) -> None:
    skip = getattr(importlib.import_module(_RULES), "add", None)  # when another thread's import is done
    if skip is not None:
        with suppress(ValueError):  # a module that was made by hand has no spec, by which torch finds its file
            skip(name)
