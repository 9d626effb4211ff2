"""Ranks that open a name together, each in a thread, and what became of each."""

from __future__ import annotations

import importlib
import socket
import textwrap
import threading
import time

import pytest

from dtorch_core import open_store, refresh

LONG = 60.0
"""A timeout that no test reaches: what ends before was woken."""

PROMPT = 10.0
"""Seconds within which a rank is woken, on a busy machine. (c10d asks a name server about each peer of a TCPStore, and
where none answers that takes five seconds.)"""

SHORT = 0.3
"""A timeout to be reached."""


@pytest.fixture
def fake(site):
    """A store backend that fits everything. ``behave[rank]``, where set, is called by its factory with the context."""
    behaviour = """
    behave = {}

    def make(ctx):
        if "/" not in ctx.name and ctx.rank in behave:
            behave[ctx.rank](ctx)

        return Store(ctx)
    """
    module = site.module(site.STORE + textwrap.dedent(behaviour))
    site.backend("fake-dist", "fake", factory=f"{module}:make", plugin="fake")
    refresh()
    return importlib.import_module(module)


class Ranks:
    """Calls in one thread each; what each returned or raised, and how long all took."""

    def __init__(self, calls):
        self.outcomes = [None] * len(calls)
        self._started = time.monotonic()
        self._threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _run(self, i, call):
        try:
            self.outcomes[i] = call()
        except BaseException as error:
            self.outcomes[i] = error

    def join(self, timeout=30.0):
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a rank hangs"

        self.seconds = time.monotonic() - self._started
        return self.outcomes


def opened(count, name="x", **each):
    """Open ``name`` on raw threads. An argument that is a function is called with the rank."""

    def call(rank):
        given = {"world_size": count, "timeout": LONG, **each}
        given = {key: value(rank) if callable(value) else value for key, value in given.items()}
        return lambda: open_store(name, rank=rank, **given)

    return Ranks([call(rank) for rank in range(count)])


def raised(outcomes, kind):
    """The messages of errors that are all of this kind."""
    for outcome in outcomes:
        assert isinstance(outcome, kind), repr(outcome)

    return [str(outcome) for outcome in outcomes]


def free_port():
    # Bound with SO_REUSEADDR and closed: free, and not handed out again soon.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
