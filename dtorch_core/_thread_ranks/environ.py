"""``os.environ`` of a rank's own: what the process has, with the rank's own variables before it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from dtorch_core import _scope
from dtorch_core._scope import Scope
from dtorch_core._thread_ranks.shared_patch import SharedPatch

_KEY = "environ"
_written: set[str] = set()
"""Variables that ranks have set for C code as well."""


def _own() -> dict[str, str | None] | None:
    """What this thread's rank has set, and, as None, deleted; None where this thread sees the process's."""
    scope = _scope.current()
    return None if scope is None else scope.own.get(_KEY)


class _Environ(os._Environ):  # type: ignore[type-arg]
    """The class that ``os.environ`` has meanwhile: the object stays, since others hold it."""

    def __getitem__(self, key: str) -> str:
        own = _own()
        if own is None or key not in own:
            return str(super().__getitem__(key))

        value = own[key]
        if value is None:
            raise KeyError(key)

        return value

    def __setitem__(self, key: str, value: str) -> None:
        own = _own()
        if own is None:
            super().__setitem__(key, value)
            return

        encoded = self.encodekey(key), self.encodevalue(value)  # which refuses what is no text
        own[key] = value
        _written.add(key)
        os.putenv(*encoded)

    def __delitem__(self, key: str) -> None:
        own = _own()
        if own is None:
            super().__delitem__(key)
            return

        self[key]  # which raises if there is none
        own[key] = None

    def __iter__(self) -> Iterator[str]:
        own = _own() or {}
        yield from [key for key in super().__iter__() if key not in own]
        yield from [key for key, value in own.items() if value is not None]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _install(stack: ExitStack) -> None:
    stack.callback(_restore)
    stack.callback(setattr, os.environ, "__class__", type(os.environ))
    os.environ.__class__ = _Environ


def _restore() -> None:
    """What C code sees is again what Python sees."""
    for key in _written:
        if key in os.environ:
            os.putenv(key, os.environ[key])
        else:
            os.unsetenv(key)

    _written.clear()


_patch = SharedPatch(_install)


@contextmanager
def held() -> Iterator[None]:
    """Ranks may have variables of their own in here."""
    with _patch.held():
        yield


@contextmanager
def entered(scope: Scope, variables: Mapping[str, str], *, alone: bool) -> Iterator[None]:
    """The rank sees these variables. What it sets, other ranks do not see; C code sees what was set last.

    :param alone: the process has no other rank: the variables are the process's, and so its children's.
    """
    if alone:
        os.environ.update(variables)  # for its exit handlers, too
        yield
        return

    with held():
        scope.own[_KEY] = dict(variables)
        try:
            yield
        finally:
            scope.own.pop(_KEY, None)
