"""Signals for ranks that are processes: what the process that started them gets, they get."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""SIGINT is none of them: Ctrl-C reaches every process of a terminal by itself."""


@contextmanager
def passed_on() -> Iterator[list[signal.Signals]]:
    """In here, signals go to the processes that this one has started with multiprocessing, and do nothing else.

    Where there are none yet, or none any more, they do what they did before. What has come is in the list. Python lets
    the main thread alone set handlers: in any other one nothing changes.
    """
    heard: list[signal.Signals] = []
    before: dict[signal.Signals, Any] = {}

    def pass_on(number: int, _: FrameType | None) -> None:
        heard.append(signal.Signals(number))
        children = multiprocessing.active_children()
        if not children:
            restore()
            os.kill(os.getpid(), number)

        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    if threading.current_thread() is not threading.main_thread():
        yield heard
        return

    before |= {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        for number in _NUMBERS:
            signal.signal(number, pass_on)

        yield heard
    finally:
        restore()
