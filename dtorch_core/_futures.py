"""Futures of what has to be waited for, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def begun(call: Callable[[], T], name: str) -> Future[T]:
    """What ``call`` returns or raises; for a call that nothing can interrupt."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def future_of(
    wait: Callable[[], T], name: str, devices: Sequence[torch.device] = ()
) -> torch.futures.Future[T]:
    """A future of what ``wait`` returns or raises, in a thread of its own.

    Its callbacks may call collectives and wait for them: no other thread is held up.

    :param wait: has a bound of its own.
    :param devices: the GPUs that the result is on.
    """
    future: torch.futures.Future[T] = torch.futures.Future(devices=list(devices) or None)

    def follow() -> None:
        try:
            value = wait()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(value)

    threading.Thread(target=follow, name=name, daemon=True).start()
    return future
