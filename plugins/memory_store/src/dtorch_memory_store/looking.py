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
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from dtorch_core._pauses import CROWD, Pauses
from dtorch_memory_store.cores import usable

VARIABLE = "DTORCH_LOOK"
"""The environment variable that keeps threads from looking, where it is ``0``. Read once in a process."""

LOOKING = 200_000
"""Nanoseconds that a thread looks for the one that wakes it."""

TURNS = 100_000 if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
"""Nanoseconds that it goes on looking for its turn: its waker may be busy elsewhere."""

SHORT = 200e-6
"""A wait of less seconds is a reason to look in the next one: it might have been shorter still."""

_CROWD = int(CROWD * 1e9)
"""Nanoseconds."""
_WOKEN, _TURN = 0, 1
_WAS_WOKEN, _CROWDED = 1, 2
"""What a look finds, as look.c has it."""
_APART = 32
"""Numbers of 4 bytes that fill two cache lines: two threads that look, look at different ones."""
_LONGEST = threading.TIMEOUT_MAX
"""Seconds that a lock can be waited for."""

Seat = Any
"""Numbers that one thread looks at, as look.c has them: the thread is woken; it is its turn."""

Look = Callable[[Any, Any, Any, int, int, int], int]


class Sleeper(Protocol):
    """One wait of one thread."""

    lock: threading.Lock
    """Locked until the thread is woken."""
    seat: Seat | None
    """The thread's, while it looks."""


def available() -> Look | None:
    """What looks, as look.c says; None where it was not compiled, or is not wanted."""
    if os.environ.get(VARIABLE, "").strip() == "0":
        return None

    try:
        look = ctypes.CDLL(str(Path(__file__).with_name("look.so"))).dtorch_look_1  # lets the GIL go while it is called
    except (OSError, AttributeError):
        return None

    look.argtypes = (*[ctypes.c_void_p] * 3, *[ctypes.c_longlong] * 3)
    return look


class _Here(threading.local):
    def __init__(self) -> None:
        self.seat = (ctypes.c_int * _APART)()
        self.looks = True
        """The last wait was short."""
        self.pauses = Pauses()


_look = available()
_here = _Here()
_cores = (ctypes.c_int * 1)()
"""How many a thread may look on now: one less than there are, since who is waited for needs one. look.c counts them."""
_turns: deque[Seat] = deque()
"""Of those who were woken while they looked, in that order."""


def report() -> str:
    """For ``dtorch doctor``: whether threads look."""
    if os.environ.get(VARIABLE, "").strip() == "0":
        return f"threads sleep at once, as {VARIABLE}=0 says: small collectives take up to twice as long"

    if _look is None:
        return (
            "threads sleep at once, since look.c was not compiled: small collectives take up to twice as long. Install "
            "a C compiler, then: pip install --force-reinstall --no-deps --no-binary dtorch-memory-store "
            "dtorch-memory-store"
        )

    if not _cores[0]:
        return "threads sleep at once, since there is one core only"

    return f"threads look for {LOOKING // 1000} us before they sleep, {_cores[0]} at once"


def sleep(sleeper: Sleeper, timeout: float) -> None:
    """Block until woken, or for ``timeout`` seconds."""
    start = time.monotonic()
    if _look is not None and _here.looks and timeout > 0 and start >= _here.pauses.until:
        if _woken_soon(_look, sleeper, timeout):
            return

        timeout -= time.monotonic() - start

    if _turns:
        _give_turn()

    sleeper.lock.acquire(True, 0 if timeout <= 0 else timeout if timeout < _LONGEST else _LONGEST)
    _here.looks = time.monotonic() - start < SHORT


def wake(sleeper: Sleeper) -> None:
    """Let the thread go on; nothing, if it was woken already."""
    try:
        sleeper.lock.release()
    except RuntimeError:
        return

    seat = sleeper.seat
    if seat is not None:
        seat[_WOKEN] = 1
        _turns.append(seat)


def _woken_soon(look: Look, sleeper: Sleeper, timeout: float) -> bool:
    """Look for a moment; whether the thread was woken."""
    if _cores[0] <= 0:
        return False

    seat, pauses = _here.seat, _here.pauses
    seat[_WOKEN] = seat[_TURN] = 0
    try:
        sleeper.seat = seat
        if sleeper.lock.acquire(False):  # woken before it had a seat
            return True

        pauses.looks += 1
        found = look(_cores, _next_turn(), seat, int(min(LOOKING, timeout * 1e9)), TURNS, _CROWD)
    finally:
        sleeper.seat = None

    if found & _CROWDED:
        pauses.begin(time.monotonic())

    if found & _WAS_WOKEN and not seat[_TURN]:
        with suppress(ValueError):  # whoever took it has yet to give it
            _turns.remove(seat)

    return sleeper.lock.acquire(False)


def _next_turn() -> Seat | None:
    """That of the thread whose turn it is once this one has let the GIL go."""
    try:
        return _turns.popleft()
    except IndexError:
        return None


def _give_turn() -> None:
    seat = _next_turn()
    if seat is not None:
        seat[_TURN] = 1


def _start_anew() -> None:
    _turns.clear()
    _cores[0] = usable() - 1


if _look is not None:
    _start_anew()
    os.register_at_fork(after_in_child=_start_anew)  # the threads that looked are the parent's
