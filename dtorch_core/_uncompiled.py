"""Packages whose code torch.compile runs as it is.

A frame that begins while compiled code runs is compiled as well: where DDP broadcasts buffers between two compiled
parts, torch's C++ calls a process group of Python. What is in there, locks, threads and memory of other ranks, is
nothing to trace.
"""

from __future__ import annotations

import sys
import threading
from functools import partial

from dtorch_core._when_imported import when_imported

_RULES = "torch._dynamo.trace_rules"

_lock = threading.Lock()
_known: set[str] = set()


def leave_uncompiled(*packages: str) -> None:
    """From now on, in the whole process. torch's compiler is not imported for it."""
    for package in packages:
        with _lock:
            if package in _known:
                continue

            _known.add(package)

        when_imported(_RULES, partial(_skip, package))


def _skip(package: str) -> None:
    skip = getattr(sys.modules[_RULES], "add", None)
    if skip is not None:
        skip(package)
