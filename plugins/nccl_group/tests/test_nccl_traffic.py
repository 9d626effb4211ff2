"""Which communicators may be made and taken down at once."""

import threading

import pytest
from dtorch_nccl_group import traffic
from dtorch_nccl_group.traffic import Traffic

from dtorch_core.testing import Background, asleep

LIMIT = 20.0


def inside(context, came, leave):
    with context():
        came.wait(LIMIT)
        assert leave.wait(LIMIT)


@pytest.mark.parametrize("kind", ["making", "ending"])
def test_many_of_a_kind_go_on_at_once(kind):
    here, came, leave = Traffic(), threading.Barrier(3), threading.Event()
    others = [Background(lambda: inside(getattr(here, kind), came, leave)) for _ in range(2)]
    came.wait(LIMIT)
    leave.set()
    for other in others:
        other.result(LIMIT)


@pytest.mark.parametrize(("first", "second"), [("making", "ending"), ("ending", "making")])
def test_one_kind_waits_for_the_other(monkeypatch, first, second):
    monkeypatch.setattr(traffic, "PATIENCE", LIMIT)
    here, came, leave = Traffic(), threading.Barrier(2), threading.Event()
    order = []
    one = Background(lambda: inside(getattr(here, first), came, leave))
    came.wait(LIMIT)

    def late():
        with getattr(here, second)():
            order.append("second")

    other = Background(late)
    asleep(other)
    order.append("first")
    leave.set()
    one.result(LIMIT)
    other.result(LIMIT)
    assert order == ["first", "second"]


def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(traffic, "PATIENCE", 0.05)
    here = Traffic()
    with here.making(), here.ending():
        pass

    with here.ending(), here.making():
        pass
