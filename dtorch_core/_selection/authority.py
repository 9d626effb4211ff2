"""Who may name a backend: the argument, then ``use_backend``, then the environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dtorch_core._selection.reasons import Kind

VARIABLES: dict[Kind, str] = {
    "store": "DTORCH_TENSOR_STORE",
    "group": "DTORCH_THREAD_GROUP",
    "promise": "DTORCH_PROMISE",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A backend that somebody asked for by name."""

    name: str
    asked_by: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a backend is asked for by its name, a str, not by {self.name!r} ({self.asked_by})")


_lock = threading.Lock()
_overrides: list[dict[Kind, Ask]] = []


@contextmanager
def use_backend(
    *, store: str | None = None, group: str | None = None, promise: str | None = None
) -> Iterator[None]:
    """Name backends for everything opened in this process meanwhile, rank threads included; the innermost wins.

    A named backend that does not fit raises its own reason; it never falls through to another one.

    :raises TypeError: if no backend is named, or one not by a str.
    """
    named: dict[Kind, str | None] = {"store": store, "group": group, "promise": promise}
    override = {kind: Ask(name, "use_backend") for kind, name in named.items() if name is not None}
    if not override:
        raise TypeError("use_backend() names no backend; pass store=, group= or promise=")

    with _lock:
        _overrides.append(override)

    try:
        yield
    finally:
        with _lock:
            # By identity: two threads may hold equal overrides and leave in any order.
            _overrides[:] = [kept for kept in _overrides if kept is not override]


def overrides() -> dict[Kind, str]:
    """What ``use_backend`` names now, by kind."""
    with _lock:
        return {kind: ask.name for override in _overrides for kind, ask in override.items()}


def asked_for(kind: Kind, argument: str | None) -> Ask | None:
    """The backend named for ``kind`` by the highest authority, or None.

    :raises ValueError: if ``kind`` is not one of store, group and promise.
    :raises TypeError: if it is not named by a str.
    """
    if kind not in VARIABLES:
        raise ValueError(f"kind must be one of {', '.join(VARIABLES)}, not {kind!r}")

    if argument is not None:
        return Ask(argument, "argument")

    with _lock:
        ask = next((override[kind] for override in reversed(_overrides) if kind in override), None)

    if ask is not None:
        return ask

    variable = VARIABLES[kind]
    name = os.environ.get(variable, "").strip()
    return Ask(name, f"environment {variable}") if name else None
