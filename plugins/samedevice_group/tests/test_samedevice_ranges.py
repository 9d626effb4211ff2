"""What torch's profiler sees of a call."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.profiler import ProfilerActivity, profile, record_function

from dtorch_core import spawn

LIMIT = 60.0
SIZE = 2

pytestmark = pytest.mark.filterwarnings("ignore")  # torch 2.13 has other names for some calls


def seen(body):
    """The ranges of rank 0, which alone has a profiler on: their names and the shapes of their tensors."""

    def rank(ctx):
        if ctx.rank:
            body(ctx.rank)
            return None

        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            body(ctx.rank)

        events = [event for event in profiler.events() if event.name.startswith("samedevice:")]
        return [(event.name.removeprefix("samedevice:"), event.input_shapes) for event in events]

    return spawn(rank, SIZE, torch_distributed=True, timeout=LIMIT)[0]


def ones(size):
    return torch.ones(size)


CALLS = {
    "all_reduce": (lambda: dist.all_reduce(ones(4)), [[4]]),
    "broadcast": (lambda: dist.broadcast(ones(4), 0), [[4]]),
    "reduce": (lambda: dist.reduce(ones(4), 0), [[4]]),
    "all_gather": (lambda: dist.all_gather_into_tensor(ones(8), ones(4)), [[8], [4]]),
    "gather": (lambda: dist.gather(ones(4), [ones(4)] * 2 if dist.get_rank() == 0 else None, 0), [[4]] * 3),
    "scatter": (lambda: dist.scatter(ones(4), [ones(4)] * 2 if dist.get_rank() == 0 else None, 0), [[4]] * 3),
    "reduce_scatter": (lambda: dist.reduce_scatter_tensor(ones(4), ones(8)), [[4], [8]]),
    "all_to_all": (lambda: dist.all_to_all_single(ones(4), ones(4)), [[4], [4]]),
    "barrier": (dist.barrier, []),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_blocking_call_is_one_range(name):
    call, shapes = CALLS[name]

    def body(rank):
        for _ in range(2):  # the second one is like the first
            call()

    assert seen(body) == [(name, shapes)] * 2


def test_an_async_call_is_a_range_and_so_is_its_wait():
    def body(rank):
        work = dist.all_reduce(ones(4), async_op=True)
        work.wait()
        work.wait()

    assert seen(body) == [("all_reduce", [[4]]), ("all_reduce.wait", [])]


def test_messages():
    def body(rank):
        if rank == 0:
            dist.send(ones(3), 1)
            dist.recv(ones(2), 1)
            dist.recv(ones(2))
        else:
            dist.recv(ones(3), 0)
            dist.send(ones(2), 0)
            dist.send(ones(2), 0)

    assert seen(body) == [("send", [[3]]), ("recv", [[2]]), ("recvAnySource", [[2]])]


def test_a_blocking_calls_range_ends_when_it_has_been_waited_for():
    def rank(ctx):
        options = c10d.AllreduceOptions()
        options.asyncOp = False
        if ctx.rank:
            dist.group.WORLD.allreduce([ones(4)], options).wait()
            return None

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            work = dist.group.WORLD.allreduce([ones(4)], options)
            with record_function("meanwhile"):
                pass

            work.wait()
            with record_function("after"):
                pass

        return {event.name: event.cpu_parent and event.cpu_parent.name for event in profiler.events()}

    parents = spawn(rank, SIZE, torch_distributed=True, timeout=LIMIT)[0]
    assert (parents["meanwhile"], parents["after"]) == ("samedevice:all_reduce", None)


def test_a_call_that_fails_ends_its_range():
    def body(rank):
        with pytest.raises(ValueError, match="there is no rank 7"):
            dist.group.WORLD.broadcast([ones(4)], 7)

        dist.group.WORLD.allreduce([ones(1)]).wait()

    assert [name for name, _ in seen(body)] == ["broadcast", "all_reduce", "all_reduce.wait"]


def test_without_a_profiler_nothing_is_kept():
    def rank(ctx):
        work = dist.all_reduce(ones(4), async_op=True)
        kept = work.range
        work.wait()
        return kept

    assert spawn(rank, SIZE, torch_distributed=True, timeout=LIMIT) == [None] * SIZE
