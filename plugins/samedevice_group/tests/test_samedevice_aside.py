"""Which calls are put beside the ranks' compute: async ones of tensors on a GPU, where the ranks are of one process."""

from types import SimpleNamespace

import pytest
import torch
from dtorch_samedevice_group import aside, collectives
from dtorch_samedevice_group.engine import Engine
from dtorch_samedevice_group.options import is_async
from dtorch_samedevice_group.work import GroupWork
from torch.distributed import distributed_c10d as c10d

from dtorch_core.joint import Ticket
from dtorch_core.testing import run_ranks

LIMIT = 20.0
KINDS = [
    "AllreduceOptions",
    "AllreduceCoalescedOptions",
    "AllgatherOptions",
    "AllToAllOptions",
    "BroadcastOptions",
    "GatherOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
]


def options(name, async_op):
    made = getattr(c10d, name)()
    made.asyncOp = async_op
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_options_say_whether_a_call_is_async(kind):
    x = torch.ones(2)
    assert is_async(([x], options(kind, True)))
    assert not is_async(([x], options(kind, False)))
    assert is_async(([x], getattr(c10d, kind)())), "c10d's own default, which its calls from C++ have"
    assert not is_async(([x], c10d.ReduceOp.SUM, 0))
    assert not is_async(())


class Store:
    rank, world_size = 0, 2

    def post(self, key, note, tensors, work, *, stream=None):
        return key, stream


class Streams:
    """What the group needs to know of CUDA."""

    def __init__(self, monkeypatch):
        self.made, self.capturing = [], False
        monkeypatch.setattr(torch.cuda, "Stream", self.make)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def make(self, device, priority=0):
        made = SimpleNamespace(device=device, priority=priority, behind=[])
        made.wait_stream = made.behind.append
        self.made.append(made)
        return made


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def on_gpu(device=0):
    return SimpleNamespace(is_cuda=True, get_device=lambda: device)


def test_one_stream_for_each_gpu_behind_the_current_one(streams):
    engine = Engine(Store(), "g", aside=True)
    posted = [engine.post_aside("call", (on_gpu(device),), collectives.nothing()) for device in (0, 1, 0)]
    assert [key for key, _ in posted] == ["collective #1", "collective #2", "collective #3"]
    first, second = streams.made
    assert [stream for _, stream in posted] == [first, second, first]
    assert (first.device, first.behind) == (0, ["current of 0"] * 2)
    assert (second.device, second.behind) == (1, ["current of 1"])
    assert {first.priority, second.priority} == {aside.HIGH}


def test_what_is_not_put_aside(streams):
    engine = Engine(Store(), "g", aside=True)
    for tensors in ((), (torch.ones(1),)):
        assert engine.post_aside("call", tensors, collectives.nothing())[1] is None

    assert engine.post("call", (on_gpu(),), collectives.nothing())[1] is None
    streams.capturing = True
    assert engine.post_aside("call", (on_gpu(),), collectives.nothing())[1] is None
    streams.capturing = False
    assert Engine(Store(), "g").post_aside("call", (on_gpu(),), collectives.nothing()) == ("collective #1", None)
    assert not streams.made


class Said(Ticket):
    """A ticket that says what is asked of it."""

    def __init__(self, name, said, error=None):
        self.name, self.said, self.error = name, said, error

    def wait(self, timeout, stream=None):
        self.said.append((self.name, timeout, stream))
        if self.error is not None:
            raise self.error

    def notes(self):
        return [self.name]

    def done(self):
        return False

    def add_done_callback(self, callback):
        callback()


def test_a_barrier_is_behind_what_was_put_aside(streams, monkeypatch):
    said = []
    tickets = [Said("first", said, ValueError("of its own Work")), Said("second", said), Said("in a graph", said)]
    given = iter(tickets)
    monkeypatch.setattr(Store, "post", lambda self, *args, stream=None: next(given))
    engine = Engine(Store(), "g", aside=True)
    for streams.capturing in (False, False, True):
        engine.post_aside("call", (on_gpu(),), collectives.nothing())

    barrier = GroupWork(Said("barrier", said), [], LIMIT)
    barrier.include_earlier(engine.begun())
    assert barrier.wait() and not barrier.is_completed()
    assert said == [("barrier", LIMIT, None), ("first", 0, None), ("second", 0, None)]
    assert not engine.begun(), "they are ordered once"


def test_future_in_a_graph_stays_on_the_stream_that_is_captured(streams, monkeypatch):
    monkeypatch.setattr(GroupWork, "_devices", lambda self: ["cuda:0"])
    work = GroupWork(None, [], LIMIT)
    assert work._streams_beside() == streams.made != []
    streams.capturing = True
    assert work._streams_beside() == []
    assert len(streams.made) == 1


def test_a_groups_calls_say_whether_they_are_async():
    """Of a ThreadGroup and its redistribution, blocking or not."""
    told = []

    def telling(method):
        def called(*args):
            told.append(is_async(args))
            return method(*args)

        return called

    def rank(ctx):
        with ctx.open_group("aside", backend="samedevice", timeout=LIMIT) as group:
            pg, x = group.process_group, torch.arange(4.0)
            for name in ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "reduce"):
                setattr(pg, name, telling(getattr(pg, name)))

            for async_op in (False, True):
                told.clear()
                for call in (
                    lambda **kw: group.all_reduce(x, **kw),
                    lambda **kw: group.broadcast(x, **kw),
                    lambda **kw: group.all_gather(x, **kw),
                    lambda **kw: group.reduce_scatter(x, **kw),
                    lambda **kw: group.all_to_all(x, 0, 0, **kw),
                    lambda **kw: group.reduce(x, **kw),
                ):
                    result = call(async_op=async_op)
                    if async_op:
                        result.result()

                assert told == [async_op] * 6

    run_ranks(rank, 1, 2 * LIMIT)
