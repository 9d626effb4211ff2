"""Goodbyes of handles that nobody closed: the garbage collector finds them. For stores."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

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


@atexit.register
def _await_last() -> None:
    deadline = time.monotonic() + _LAST
    for thread in list(_being_said):
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
