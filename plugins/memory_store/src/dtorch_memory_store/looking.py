"""A thread that waits looks for a moment before it sleeps, without the GIL, and takes turns with the others.

To fall asleep and be woken takes longer than most calls. And the GIL makes a second sleep of it: who is woken needs it,
and whoever woke it still has it, for the rest of its own call and the beginning of its next one. So a thread that is
woken while it looks goes on looking until its waker waits in turn, and has let the GIL go: then it has it at once.

Looking decides nothing: all that can go wrong is that it ends early or late. The lock that a thread sleeps on says
whether it was woken. What looks is a few lines of C. Where they were not compiled, nobody looks.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

VARIABLE = "DTORCH_LOOK"
"""The environment variable that keeps threads from looking, where it is ``0``. Read once in a process."""

LOOKING = 100_000
"""Nanoseconds that a thread looks for the one that wakes it."""

TURNS = 50_000
"""Nanoseconds that it goes on looking for its turn: its waker may be busy elsewhere."""

SHORT = 150e-6
"""A wait of less seconds is a reason to look in the next one: it might have been shorter still."""

_WOKEN, _TURN = 0, 1
_APART = 32
"""Numbers of 4 bytes that fill two cache lines: two threads that look, look at different ones."""
_LONGEST = threading.TIMEOUT_MAX
"""Seconds that a lock can be waited for."""


class Seat:
    """What a thread looks at."""

    def __init__(self) -> None:
        self.numbers = (ctypes.c_int * _APART)()
        """As look.c has them: the thread is woken; it is its turn."""
        self.core: list[None] = []
        """One, while the thread has a core to look on. Its waker takes it away, since that one may look next."""


class Sleeper(Protocol):
    """One wait of one thread."""

    lock: threading.Lock
    """Locked until the thread is woken."""
    seat: Seat | None
    """The thread's, while it looks."""


Look = Callable[[Any, Any, int, int], int]


def available() -> Look | None:
    """What looks, as look.c says; None where it was not compiled, or is not wanted."""
    if os.environ.get(VARIABLE) == "0":
        return None

    try:
        look = ctypes.CDLL(str(Path(__file__).with_name("look.so"))).dtorch_look  # lets the GIL go while it is called
    except (OSError, AttributeError):
        return None

    look.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong)
    return look


def report() -> str:
    """For ``dtorch doctor``: whether threads look."""
    if _look is not None:
        return f"threads look for {LOOKING // 1000} us before they sleep, {len(os.sched_getaffinity(0)) - 1} at once"

    if os.environ.get(VARIABLE) == "0":
        return f"threads sleep at once, as {VARIABLE}=0 says: small collectives take up to twice as long"

    return (
        "threads sleep at once, since look.c was not compiled: small collectives take up to twice as long. Install a C "
        "compiler, then: pip install --force-reinstall --no-deps --no-binary dtorch-memory-store dtorch-memory-store"
    )


class _Here(threading.local):
    def __init__(self) -> None:
        self.seat = Seat()
        self.looks = True
        """The last wait was short."""


_look = available()
_here = _Here()
_cores: deque[None] = deque()
"""Those that a thread may look on: one less than there are, since who is waited for needs one."""
_turns: deque[Seat] = deque()
"""Of those who were woken while they looked, in that order."""


def sleep(sleeper: Sleeper, timeout: float) -> None:
    """Block until woken, or for ``timeout`` seconds."""
    start = time.monotonic()
    if _look is None or not _here.looks or timeout <= 0 or not _woken_soon(_look, sleeper, timeout):
        if _turns:
            _give_turn()

        sleeper.lock.acquire(True, 0 if timeout <= 0 else timeout if timeout < _LONGEST else _LONGEST)
        _here.looks = time.monotonic() - start < SHORT


def wake(sleeper: Sleeper) -> None:
    """Let the thread go on. Called once."""
    sleeper.lock.release()
    seat = sleeper.seat
    if seat is not None:
        seat.numbers[_WOKEN] = 1
        _turns.append(seat)
        _leave_core(seat)


def _woken_soon(look: Look, sleeper: Sleeper, timeout: float) -> bool:
    """Look for a moment; whether the thread was woken."""
    seat = _here.seat
    try:
        seat.core.append(_cores.pop())
    except IndexError:
        return False

    numbers = seat.numbers
    numbers[_WOKEN] = numbers[_TURN] = 0
    try:
        sleeper.seat = seat
        if sleeper.lock.acquire(False):  # woken before it had a seat
            return True

        look(_next_turn(), numbers, min(LOOKING, int(timeout * 1e9)), TURNS)
    finally:
        sleeper.seat = None
        if seat.core:
            _leave_core(seat)

    if numbers[_WOKEN] and not numbers[_TURN]:
        with suppress(ValueError):  # whoever took it has yet to give it
            _turns.remove(seat)

    return sleeper.lock.acquire(False)


def _next_turn() -> Any:  # noqa: ANN401  # ctypes has no type for an array of some length
    """The numbers of the thread whose turn it is once this one has let the GIL go."""
    try:
        return _turns.popleft().numbers
    except IndexError:
        return None


def _give_turn() -> None:
    numbers = _next_turn()
    if numbers is not None:
        numbers[_TURN] = 1


def _leave_core(seat: Seat) -> None:
    with suppress(IndexError):  # its waker and the thread itself may both come here
        _cores.append(seat.core.pop())


def _start_anew() -> None:
    _turns.clear()
    _cores.clear()
    _cores.extend([None] * (len(os.sched_getaffinity(0)) - 1))


if _look is not None:
    _start_anew()
    os.register_at_fork(after_in_child=_start_anew)  # the threads that looked are the parent's
