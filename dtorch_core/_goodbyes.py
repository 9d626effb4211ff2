"""Goodbyes of handles that nobody closed: the garbage collector finds them. For stores."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable

from dtorch_core._spawn.ranks import is_told, said

_LAST = 5.0
"""Seconds that the end of the process gives to goodbyes that are being said."""

_being_said: set[threading.Thread] = set()


def say_elsewhere(leave: Callable[[], None], name: str) -> None:
    """Call ``leave`` in a thread of its own.

    The collector finds a handle wherever a thread happens to be: under any lock of ours or of the program's. A goodbye
    takes locks, waits for threads, and calls back.
    """

    def say() -> None:
        try:
            leave()
        finally:
            _being_said.discard(thread)

    thread = threading.Thread(target=say, name=name, daemon=True)
    if not threading.main_thread().is_alive():  # the interpreter ends, and starts none any more
        leave()
        return

    _being_said.add(thread)
    try:
        thread.start()
    except RuntimeError:  # there can be no other
        say()


def uncaught() -> str | None:
    """The error that ends this process, for goodbyes that are said at its end; None before, and if nothing was raised.

    None, too, where other ranks have told this one: who is at fault they know. An exit code alone is not known.
    """
    if threading.main_thread().is_alive() or hasattr(sys, "ps1"):  # a prompt outlives errors
        return None

    error = getattr(sys, "last_value", None)  # the interpreter keeps it as it reports it
    return said(error) if error is not None and not is_told(error) else None


@atexit.register
def _await_last() -> None:
    deadline = time.monotonic() + _LAST
    for thread in list(_being_said):
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
