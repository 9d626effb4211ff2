"""Signal handlers of ranks, which are threads: Python lets only the main thread set one, and runs all of them in it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from dtorch_core import _scope
from dtorch_core._scope import Scope
from dtorch_core._thread_ranks.shared_patch import SharedPatch, replace

_KEY = "signals"
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")
_scopes: list[Scope] = []
_outlived: set[int] | None = None
"""Signals that ranks have had handlers for, in a process that is theirs alone."""


def _handlers() -> dict[int, Any] | None:
    """This thread's rank's, by number; None where it may not have any."""
    scope = _scope.current()
    return None if scope is None else scope.own.get(_KEY)


def _install(stack: ExitStack) -> None:
    if threading.current_thread() is threading.main_thread():
        for name in _NAMES:
            number = getattr(signal, name)
            before = signal.signal(number, _passed_on)
            _before[number] = before
            stack.callback(_restore, number, signal.SIG_DFL if before is None else before)

    def set_handler(number: int, handler: Any) -> Any:  # noqa: ANN401
        own = _handlers()
        if own is None or threading.current_thread() is threading.main_thread():
            return set_outside(number, handler)

        before = own.get(number, _before.get(number, signal.SIG_DFL))
        own[number] = handler
        if _outlived is not None and callable(handler):
            _outlived.add(number)

        return before

    def get_handler(number: int) -> Any:  # noqa: ANN401
        own = _handlers()
        return get_outside(number) if own is None else own.get(number, _before.get(number, signal.SIG_DFL))

    set_outside = replace(stack, signal, "signal", set_handler)
    get_outside = replace(stack, signal, "getsignal", get_handler)


_before: dict[int, Any] = {}
"""The process's handlers."""


def outlive_handled() -> None:
    """This process is its ranks' alone: once they have ended, a signal that they had a handler for does not kill it.

    It may come late: a peer that has heard it has told them to end.
    """
    global _outlived
    _outlived = set()


def _restore(number: int, before: Any) -> None:  # noqa: ANN401
    signal.signal(number, signal.SIG_IGN if _outlived is not None and number in _outlived else before)


def _passed_on(number: int, frame: FrameType | None) -> None:
    """Call what the ranks have set, as each of them; where none has, what the process has."""
    found = [(scope, scope.own[_KEY][number]) for scope in list(_scopes) if number in scope.own.get(_KEY, {})]
    for scope, handler in found:
        if callable(handler):
            with _scope.within(scope):
                handler(number, frame)

    if found and all(handler != signal.SIG_DFL for _, handler in found):
        return

    if not found and _outlived is not None and number in _outlived:
        return

    before = _before.get(number, signal.SIG_DFL)
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_patch = SharedPatch(_install)


@contextmanager
def held() -> Iterator[None]:
    """Ranks may set handlers in here, for the usual signals, if the main thread is the one that enters."""
    with _patch.held():
        yield


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """This rank may set handlers. They run in the main thread, which sees what the rank has of its own."""
    with held():
        scope.own[_KEY] = {}
        _scopes.append(scope)
        try:
            yield
        finally:
            _scopes.remove(scope)
            scope.own.pop(_KEY, None)
