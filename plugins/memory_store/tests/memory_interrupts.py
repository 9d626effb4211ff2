"""Raises in a rank's thread what a signal's handler could raise, at every place where one runs.

The place is chosen by a trace function, so each is tried: in a thread of its own, which signals themselves never reach.
"""

import dis
import inspect
import sys
import threading
from itertools import count
from pathlib import Path

import pytest
from dtorch_memory_store import waiting

from dtorch_core import AbortedError, PeerLostError, presence
from dtorch_core.testing import Background

LIMIT = 15.0
LONG = 600.0
"""A timeout that ends no wait of these."""
MOST = 3000
"""Places in one call: more is a fault of the test."""
FILES = (str(Path(waiting.__file__).parent), presence.__file__)
LEFT = (AbortedError, PeerLostError)
HANDLED = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
"""After these CPython runs handlers; after a jump back, with the jump."""

traceable = pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="where a jump leads out of a block, Python 3.12 has a tracer raise outside of it, and a handler inside",
)


class Interrupt(BaseException):
    """As KeyboardInterrupt, but raised by these tests only."""


class Raising:
    """Raises in the thread that it is entered in, at one place of those where CPython runs the handlers of signals:
    where a function begins, where a loop goes back, after a call."""

    def __init__(self, number):
        self.left = number
        self.on_call = self.called  # kept: see the file store's tests, where another object was called in its place

    def __enter__(self):
        sys.settrace(self.on_call)
        return self

    def __exit__(self, kind, error, trace):
        sys.settrace(None)

    def place(self):
        self.left -= 1
        if self.left == 0:
            raise Interrupt

    def called(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(FILES):
            return None

        frame.f_trace_opcodes = True
        before = ""
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:  # one that is dropped is called as well, by nobody
            self.place()

        def goes_on(frame, event, arg):
            nonlocal before
            if event == "exception":
                before = ""
            elif event == "opcode":
                did, before = before, dis.opname[frame.f_code.co_code[frame.f_lasti]]
                if did in HANDLED:
                    self.place()

            return goes_on

        return goes_on


class Sleeps:
    """Tells when a thread has come to where it sleeps."""

    def __init__(self, monkeypatch):
        self._events = {}
        sleep = waiting.Waiter.sleep

        def says(waiter, timeout):
            self._event(threading.current_thread()).set()
            sleep(waiter, timeout)

        monkeypatch.setattr(waiting.Waiter, "sleep", says)

    def wait(self, background):
        """For the first time that the thread sleeps."""
        assert self._event(background.thread).wait(LIMIT)

    def _event(self, thread):
        return self._events.setdefault(thread, threading.Event())


@pytest.fixture(name="sleeps")
def sleeps_fixture(monkeypatch):
    return Sleeps(monkeypatch)


def close(session):
    session.close(0)


def abort(session):
    session.abort("rank 0 was interrupted")


@pytest.fixture(params=[close, abort])
def goodbye(request):
    return request.param


def interrupted_at(number, body):
    """Whether the body was interrupted at that place; False if it has less of them, and has ended."""

    def run():
        try:
            with Raising(number):
                body()
        except Interrupt:
            return True

        return False

    return Background(run, f"interrupted at {number}").result(LIMIT)


def at_every_place(attempt):
    """``attempt(number)`` until it says that there was no interrupt."""
    assert attempt(1)
    for number in count(2):
        if not attempt(number):
            return

        assert number < MOST


def outcome(background, allowed=LEFT):
    """What it returned, or the error that ranks may end with because another one was interrupted."""
    try:
        return background.result(LIMIT)
    except allowed as error:
        return error
