"""Threads that a rank starts belong to the rank: they see its process groups, random numbers and environment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from dtorch_core import _scope
from dtorch_core._scope import Scope
from dtorch_core._thread_ranks.shared_patch import SharedPatch, replace


def _install(stack: ExitStack) -> None:
    def start(self: threading.Thread, *args: Any, **named: Any) -> None:  # noqa: ANN401 - whatever Python's takes
        scope = _scope.current()
        if scope is not None:
            from torch._C import _is_multithreading_enabled

            self.run = _Run(self.run, scope, _is_multithreading_enabled())  # type: ignore[method-assign]

        original(self, *args, **named)

    original = replace(stack, threading.Thread, "start", start)


class _Run:
    """What the thread does, in the scope of the rank that started it."""

    def __init__(self, run: Callable[[], None], scope: Scope, autograd_threads: bool) -> None:
        self._run, self._scope, self._autograd_threads = run, scope, autograd_threads

    def __call__(self) -> None:
        from torch.autograd import set_multithreading_enabled

        _scope.enter(self._scope)
        try:
            with set_multithreading_enabled(self._autograd_threads):
                self._run()
        finally:
            _scope.enter(None)
            del self._run, self._scope  # the thread object may outlive the rank


inherited = SharedPatch(_install)
"""While it is held, new threads have the scope of the thread that starts them.

Their backward passes run in themselves if the rank's do, as those of ranks that share a process: autograd's own
threads, one a device, belong to no rank, and a collective that waits in one of them would stop every other rank's
backward.
"""
