"""Futures of what has to be waited for, in a thread of its own."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")

_LONGEST = 5.0
"""Seconds that the end of the interpreter is put off: a callback may wait for a rank that never comes."""

_MOMENT = 1.0
"""Seconds that a thread is given to end, when what it waits for has ended."""

_settling: set[int] = set()
"""Threads that are about to end a future."""
_settled = threading.Condition()


def begun(call: Callable[[], T], name: str) -> Future[T]:
    """What ``call`` returns or raises; for a call that nothing can interrupt."""
    return _begun(call, name)[0]


def interruptibly(call: Callable[[], T], name: str, give_up: Callable[[], None]) -> T:
    """What ``call`` returns or raises, which nothing can interrupt; here it can be left.

    Signals are the main thread's: there their handlers run meanwhile, and what they raise is raised at once.

    :param give_up: makes ``call`` end in a moment; called if it is left.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()

    outcome, thread = _begun(call, name)
    try:
        return outcome.result()
    except BaseException:
        if not outcome.done():
            give_up()

        raise
    finally:
        thread.join(_MOMENT)


def _begun(call: Callable[[], T], name: str) -> tuple[Future[T], threading.Thread]:
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return outcome, thread


def future_of(
    wait: Callable[[], T], name: str, devices: Sequence[torch.device] = ()
) -> torch.futures.Future[T]:
    """A future of what ``wait`` returns or raises, in a thread of its own.

    Its callbacks may call collectives and wait for them: no other thread is held up.

    :param wait: has a bound of its own.
    :param devices: the GPUs that the result is on.
    """
    future: torch.futures.Future[T] = torch.futures.Future(devices=list(devices) or None)

    def settle(value: T | None, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(value)  # type: ignore[arg-type]

    settle_after(wait, settle, name)
    return future


def settle_after(
    wait: Callable[[], T], settle: Callable[[T | None, Exception | None], None], name: str
) -> None:
    """In a thread of its own: wait, and end a future of torch's with what the wait has returned or raised.

    To wait for the future may be the program's last line, and the interpreter's end stops a thread where it next needs
    the GIL. In the midst of torch's C++, which ends futures and lets go of Works without it, that aborts the process.
    So the interpreter's end waits for the threads that have come to ``settle``, until they hold nothing of torch's.
    """
    given = [(wait, settle)]  # the thread's own arguments are let go too late

    def run() -> None:
        wait, settle = given.pop()
        value, error = None, None
        try:
            value = wait()
        except Exception as raised:
            error = raised

        here = threading.get_ident()
        with _settled:
            _settling.add(here)

        try:
            settle(value, error)
            del wait, settle, value, error
        finally:
            with _settled:
                _settling.discard(here)
                _settled.notify_all()

    threading.Thread(target=run, name=name, daemon=True).start()


@atexit.register
def _await_settled() -> None:
    with _settled:
        _settled.wait_for(lambda: not _settling - {threading.get_ident()}, _LONGEST)
