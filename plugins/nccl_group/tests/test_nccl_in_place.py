"""all_reduce in place again and again, which skips what an earlier call has shown to be needless. torch's Gloo takes
NCCL's place."""

import importlib.util
import threading
from pathlib import Path

import pytest
import torch

from dtorch_core import PeerLostError, RankFailedError, StoreTimeoutError
from dtorch_core._groups import c10d

PROGRAM = Path(__file__).with_name("nccl_ranks.py")

_spec = importlib.util.spec_from_file_location("nccl_ranks", PROGRAM)
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
LIMIT = ranks.GLOO_LIMIT


@pytest.fixture(scope="module", autouse=True)
def registered():
    with ranks.over_gloo():
        yield


@pytest.fixture
def planned(monkeypatch):
    """The tensors of calls that were planned, of all ranks."""
    found = []
    original = c10d.all_reduce

    def all_reduce(group, tensor, op, terms):
        found.append(tensor)
        return original(group, tensor, op, terms)

    monkeypatch.setattr(c10d, "all_reduce", all_reduce)
    return found


def on_ranks(body, world_size=2, timeout=LIMIT):
    return ranks.on_threads(body, world_size, timeout)


def part(rank, *shape):
    return ranks.part(rank, "cpu", *shape)


def test_it_is_planned_once(planned):
    def body(group):
        for turn in range(5):
            x = part(group.rank, 3, 5) + turn
            assert group.all_reduce(x, out=x) is x
            assert torch.equal(x, part(0, 3, 5) + part(1, 3, 5) + 2 * turn)


    on_ranks(body)
    assert len(planned) == 2  # on each rank


@pytest.mark.parametrize(
    ("x", "op"),
    [
        (lambda rank: part(rank, 4, 6).t(), "sum"),
        (lambda rank: part(rank, 4, 6), "max"),
        (lambda rank: part(rank, 4, 6), "avg"),
        (lambda rank: part(rank, 4, 6).to(torch.complex64), "sum"),
        (lambda rank: part(rank, 4, 6) > 1003, "sum"),
        (lambda rank: part(rank, 4, 6).half(), "avg"),
        (lambda rank: part(rank, 0, 6), "sum"),
    ],
    ids=["transposed", "max", "avg", "complex", "bool", "half avg", "empty"],
)
def test_what_takes_more_is_planned_every_time(planned, x, op):
    def body(group):
        xs = [x(rank) for rank in range(2)]
        expected = group.all_reduce(xs[group.rank], op)
        for _ in range(3):
            mine = xs[group.rank].clone()
            group.all_reduce(mine, op, out=mine)
            assert torch.equal(mine, expected)

    on_ranks(body)
    assert len(planned) == 8


def test_negative_views_are_planned_every_time(planned):
    """Their memory says another number than they do; on one rank, or on all."""

    def body(group):
        x = part(group.rank, 4)
        group.all_reduce(x, out=x)
        for negative in (group.rank == 0, True):
            x = part(group.rank, 4)
            mine = torch._neg_view(x.neg()) if negative else x
            assert torch.equal(group.all_reduce(mine, out=mine), part(0, 4) + part(1, 4))
            assert mine.is_neg() == negative

    on_ranks(body)
    assert len(planned) == 5


def test_other_shapes_and_ops_are_others(planned):
    def body(group):
        for _ in range(2):
            for shape in ((3,), (5,), (3, 1)):
                for op, wanted in (("sum", torch.add), ("product", torch.mul)):
                    x = part(group.rank, *shape)
                    group.all_reduce(x, op, out=x)
                    assert torch.equal(x, wanted(part(0, *shape), part(1, *shape)))

    on_ranks(body)
    assert len(planned) == 12


def test_it_does_not_overtake_a_call_that_waits_for_sizes():
    come = threading.Event()

    def body(group):
        rank = group.rank
        x = part(rank, 4)
        group.all_reduce(x, out=x)
        if rank == 1:
            assert come.wait(LIMIT)

        gathered = group.all_gather(part(rank, 1 + rank), async_op=True)
        come.set()
        x = part(rank, 4)
        group.all_reduce(x, out=x)
        assert torch.equal(x, part(0, 4) + part(1, 4))
        assert torch.equal(gathered.result(), torch.cat([part(0, 1), part(1, 2)]))

    on_ranks(body)


def test_a_rank_that_raises_is_named():
    def body(group):
        for _ in range(2):
            x = part(group.rank, 4)
            group.all_reduce(x, out=x)

        if group.rank == 1:
            raise ZeroDivisionError("on purpose")

        with pytest.raises(PeerLostError, match=r"all_reduce\(float32\[4\], sum\).*rank 1"):
            group.all_reduce(x, out=x)

    with pytest.raises(RankFailedError, match="rank 1 of 2 failed with ZeroDivisionError"):
        on_ranks(body)


@pytest.mark.parametrize(("of_the_group", "of_the_call", "plans"), [(1, None, 2), (LIMIT, 0.5, 3)])
def test_a_late_rank_is_named(planned, of_the_group, of_the_call, plans):
    """At the group's timeout by the short way, at one of the call's own by the long one."""
    over = threading.Event()

    def body(group):
        x = part(group.rank, 4)
        group.all_reduce(x, out=x)
        if group.rank == 1:
            assert over.wait(LIMIT)
            return

        with pytest.raises(StoreTimeoutError, match=r"not every rank had come(?s:.*)late: rank 1"):
            group.all_reduce(x, out=x, timeout=of_the_call)

        over.set()

    on_ranks(body, timeout=of_the_group)
    assert len(planned) == plans
