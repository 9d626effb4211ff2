"""Which streams wait for which, in joint work on a GPU: on streams that only remember what comes before what."""

import itertools
import threading
from collections import defaultdict, deque
from contextlib import contextmanager

import pytest
import torch

from dtorch_core import _events, streams
from dtorch_core.testing import run_ranks

LIMIT = 15.0


class Gpus:
    """CUDA as far as order goes: a stream is what has to be done before whatever is queued on it next."""

    def __init__(self):
        self.defaults = {}
        self.here = threading.local()
        self.events = 0
        self.kept = []

    def default_stream(self, device):
        return self.defaults.setdefault(device, Stream(self, device, raw=0))

    def current_stream(self, device):
        return getattr(self.here, "streams", {}).get(device) or self.default_stream(device)

    def raw_current(self, device):
        return self.current_stream(device).cuda_stream

    def new_event(self, *, blocking=False):
        return Event(self)

    @contextmanager
    def stream(self, stream):
        before = getattr(self.here, "streams", {})
        self.here.streams = before if stream is None else {**before, stream.device_index: stream}
        try:
            yield
        finally:
            self.here.streams = before

    def run(self, what, device):
        """A kernel on the current stream: what had to be done before it."""
        stream = self.current_stream(device)
        before = set(stream.done)
        stream.done.add(what)
        return before


class Stream:
    raws = itertools.count(1)

    def __init__(self, gpus, device=0, raw=None):
        self.device_index = device
        self.cuda_stream = next(self.raws) if raw is None else raw
        self.done = set()

    def wait_event(self, event):
        self.done |= event.done


class Event:
    def __init__(self, gpus):
        self.gpus = gpus

    def record(self, stream):
        self.gpus.events += 1
        self.done = set(stream.done)


class Tensor:
    is_cuda = True

    def __init__(self, gpus, device=0):
        self.gpus, self.index = gpus, device

    @property
    def device(self):
        return self.index

    def get_device(self):
        return self.index

    def is_conj(self):
        return False

    def is_neg(self):
        return False

    def record_stream(self, stream):
        self.gpus.kept.append((self, stream))


@pytest.fixture
def gpus(monkeypatch):
    fake = Gpus()
    for name in ("default_stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))

    monkeypatch.setattr(torch.cuda, "Event", fake.new_event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_events, "_pools", defaultdict(deque))
    monkeypatch.setattr(streams, "raw_current", fake.raw_current)
    return fake


def joint(gpus, ranks, order, waits=None, devices=None):
    """One piece of work: ``ranks[r]`` is rank r's current stream, or a pair of that and the stream that it gives.

    The ranks come in ``order``; each waits on its own stream, or on ``waits[r]``. What was before the work, and what is
    before that which each rank queues then.
    """
    devices = devices or [0] * len(ranks)
    turns = [threading.Event() for _ in range(len(ranks) + 1)]
    turns[0].set()
    seen = []

    def work(offers):
        seen.append(gpus.run("work", devices[order[0]]))
        return ()

    def rank(ctx):
        with ctx.open_store("joint", backend="memory", timeout=LIMIT) as store:
            current, given = ranks[ctx.rank] if isinstance(ranks[ctx.rank], tuple) else (ranks[ctx.rank], None)
            turn, tensor = order.index(ctx.rank), Tensor(gpus, devices[ctx.rank])
            with gpus.stream(current):
                assert turns[turn].wait(LIMIT)
                with gpus.stream(given):
                    gpus.run(f"input {ctx.rank}", tensor.index)

                ticket = store.post("k", "", (tensor,), work, stream=given)
                turns[turn + 1].set()

            with gpus.stream(waits[ctx.rank] if waits else current):
                ticket.wait(LIMIT, given)
                with gpus.stream(given):
                    return gpus.run(f"output {ctx.rank}", tensor.index)

    after = run_ranks(rank, len(ranks), 2 * LIMIT)
    (before,) = seen
    return before, after


def test_default_stream_needs_no_events(gpus):
    for order in ([0, 1, 2], [2, 0, 1]):
        before, after = joint(gpus, [None] * 3, order)
        assert before >= {"input 0", "input 1", "input 2"}
        assert all("work" in each for each in after)

    assert not gpus.events
    assert not gpus.kept


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("kinds", list(itertools.product(["default", "own", "given"], repeat=3)), ids="-".join)
def test_any_streams(gpus, kinds, order):
    made = {
        "default": lambda: None,
        "own": lambda: Stream(gpus),
        "given": lambda: (None, Stream(gpus)),
    }
    ranks = [made[kind]() for kind in kinds]
    before, after = joint(gpus, ranks, list(order))
    assert before >= {"input 0", "input 1", "input 2"}
    assert all("work" in each for each in after)

    # Whoever's stream is not the work's may let its tensors go before the work is done.
    home = kinds[order[-1]]
    kept = {tensor for tensor, _ in gpus.kept}
    assert len(kept) == (3 - kinds.count("default") if home == "default" else 3)


@pytest.mark.parametrize("waits", list(itertools.product([False, True], repeat=2)), ids=str)
def test_waits_on_another_stream_than_was_posted_on(gpus, waits):
    other = [Stream(gpus) if each else None for each in waits]
    before, after = joint(gpus, [None, None], [0, 1], other)
    assert before >= {"input 0", "input 1"}
    assert all("work" in each for each in after)
    assert gpus.events <= sum(waits)
    assert bool(gpus.events) == any(waits)


def test_wait_on_the_default_stream_for_work_elsewhere(gpus):
    before, after = joint(gpus, [Stream(gpus), Stream(gpus)], [1, 0], [None, None])
    assert before >= {"input 0", "input 1"}
    assert all("work" in each for each in after)


def test_default_streams_of_two_gpus_are_not_one(gpus):
    for order in ([0, 1], [1, 0]):
        before, after = joint(gpus, [None, None], order, devices=[0, 1])
        assert before >= {"input 0", "input 1"}
        assert all("work" in each for each in after)
        assert gpus.events
