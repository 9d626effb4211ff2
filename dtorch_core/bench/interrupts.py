"""Ctrl-C while ranks are measured: what all of them have begun is ended first, so that none waits for the others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def after_this() -> Iterator[None]:
    """Ctrl-C is raised at the end of the block; a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

    if came:
        raise KeyboardInterrupt
