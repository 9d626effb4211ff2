"""Events are recorded again once nobody has them, and never destroyed. Of stand-ins: no GPU is needed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch

from dtorch_core import _events

GPU0, GPU1 = SimpleNamespace(device_index=0), SimpleNamespace(device_index=1)


class Event:
    def __init__(self, *, blocking):
        self.blocking = blocking
        self.recorded = []

    def record(self, stream):
        self.recorded.append(stream)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_events, "_pools", defaultdict(deque))


def test_an_event_that_somebody_has_is_left_alone():
    events = [_events.recorded(GPU0) for _ in range(5)]
    assert len(set(events)) == 5
    assert [event.recorded for event in events] == [[GPU0]] * 5


def test_one_that_nobody_has_is_recorded_again():
    first = weakref.ref(_events.recorded(GPU0))
    assert _events.recorded(GPU0) is first()
    assert first().recorded == [GPU0, GPU0]


def test_one_in_a_circle_is_free_once_that_is_collected():
    circle = [_events.recorded(GPU0)]
    circle.append(circle)
    first = weakref.ref(circle[0])
    held = _events.recorded(GPU0)
    assert held is not first()
    del circle
    gc.collect()
    assert first() is not None
    again = [_events.recorded(GPU0) for _ in range(2)]
    assert first() in again


def test_each_gpu_and_kind_has_its_own():
    first, other = _events.recorded(GPU0), _events.recorded(GPU1)
    blocking = _events.recorded(GPU0, blocking=True)
    kept = {id(event) for event in (first, other, blocking)}
    assert (first.blocking, blocking.blocking) == (False, True)
    del first, other, blocking
    again = [_events.recorded(GPU1), _events.recorded(GPU0, blocking=True), _events.recorded(GPU0)]
    assert {id(event) for event in again} == kept
    assert [event.recorded for event in again] == [[GPU1] * 2, [GPU0] * 2, [GPU0] * 2]


def test_few_are_made_where_few_are_held():
    held = []
    for _ in range(1000):
        held.append(_events.recorded(GPU0))
        del held[:-3]

    assert len(_events._pools[0, False]) <= 6


def test_none_that_a_graph_has_is_used_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = weakref.ref(_events.recorded(GPU0))
    assert captured() is None


def test_threads_never_have_the_same_one():
    def rank():
        there.wait()
        for _ in range(2000):
            event = _events.recorded(GPU0)
            mine = object()
            event.owner = mine
            other = _events.recorded(GPU0)
            if event.owner is not mine or other is event:
                wrong.append(event)

    wrong, there = [], threading.Barrier(4)
    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()

    assert wrong == []
