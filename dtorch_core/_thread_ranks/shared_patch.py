"""Changes to torch and to Python that stand while somebody needs them, and are undone by the last one to leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any


class SharedPatch:
    """One set of changes, counted.

    :param install: makes them, and leaves on the stack what undoes them.
    """

    def __init__(self, install: Callable[[ExitStack], None]) -> None:
        self._install = install
        self._lock = threading.RLock()
        self._users = 0
        self._stack = ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The changes stand in here, in every thread."""
        with self._lock:
            if self._users == 0:
                with ExitStack() as stack:  # a change that fails takes back those before it
                    self._install(stack)
                    self._stack = stack.pop_all()

            self._users += 1

        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._stack.close()

    def extend(self, install: Callable[[ExitStack], None]) -> None:
        """Make more changes, undone with the others. Somebody holds these."""
        with self._lock:
            install(self._stack)


def lacking(needed: Mapping[Any, Iterable[str]]) -> list[str]:
    """A sentence for each attribute that an object does not have, of those it needs to have."""
    return [
        f"{owner.__name__} has no {name}"
        for owner, names in needed.items()
        for name in names
        if not hasattr(owner, name)
    ]


def replace(stack: ExitStack, owner: Any, name: str, value: object) -> Any:  # noqa: ANN401 - any attribute
    """Set an attribute, of which the stack restores what was there; that is returned."""
    own = name in vars(owner)
    before = getattr(owner, name)
    kept = vars(owner)[name] if own else None  # a static method is to be put back as one
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, kept) if own else stack.callback(delattr, owner, name)
    return before
