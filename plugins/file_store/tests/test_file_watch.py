"""Who waits looks before it sleeps, and no longer than that does good."""

import pytest
from dtorch_file_store import watch

from dtorch_core import _pauses


@pytest.fixture
def looking(monkeypatch):
    """A watch of which a thread looks for a minute, with a clock of its own that nothing but a yield moves on."""
    own = watch.Watch()
    own.looking = 60.0
    clock = {"now": 100.0, "yield": 1e-6}

    def offer():
        clock["now"] += clock["yield"]

    monkeypatch.setattr(watch.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(watch.os, "sched_yield", offer)
    yield own, clock
    own.close()


def looks(own, most=10):
    return sum(1 for _ in zip(range(most), own.moment(), strict=False))


def test_thread_looks_again_and_again(looking):
    own, _ = looking
    assert looks(own) == 10


def test_look_ends_in_time(looking):
    own, clock = looking
    clock["yield"], own.looking = 100e-6, 250e-6
    assert looks(own) == 3


def test_thread_whose_core_is_taken_looks_no_more_for_a_while(looking):
    """A program that is always busy has the core for milliseconds, and nobody wakes who only offers it."""
    own, clock = looking
    clock["yield"] = 4e-3
    assert looks(own) == 1
    assert looks(own) == 0
    clock["now"] += _pauses.FIRST
    clock["yield"] = 1e-6
    assert looks(own) == 10
