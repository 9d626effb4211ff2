"""all_reduce in place again and again, which skips what an earlier call has shown to be needless. torch's Gloo takes
NCCL's place."""

import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from dtorch_nccl_group import group as factory

import dtorch_core
from dtorch_core import PeerLostError, RankFailedError, StoreTimeoutError, _c10d
from dtorch_core.testing import run_ranks

PROGRAM = Path(__file__).with_name("nccl_ranks.py")
LIMIT = 20.0

_spec = importlib.util.spec_from_file_location("nccl_ranks", PROGRAM)
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)


@pytest.fixture(scope="module", autouse=True)
def registered():
    patch = pytest.MonkeyPatch()
    patch.setattr(factory, "nccl", ranks.gloo())
    dtorch_core.register(ranks.Plugin(), name="nccl over gloo")
    yield
    dtorch_core.unregister("nccl over gloo")
    patch.undo()


@pytest.fixture
def planned(monkeypatch):
    """The tensors of calls that were planned, of all ranks."""
    found = []
    original = _c10d.all_reduce

    def all_reduce(group, tensor, op, timeout):
        found.append(tensor)
        return original(group, tensor, op, timeout)

    monkeypatch.setattr(_c10d, "all_reduce", all_reduce)
    return found


def on_ranks(body, world_size=2, timeout=LIMIT):
    def rank(ctx):
        with ctx.open_group(backend="gloo", timeout=timeout) as group:
            return body(group)

    return run_ranks(rank, world_size, 2 * LIMIT)


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


def test_a_late_rank_is_named():
    over = threading.Event()

    def body(group):
        x = part(group.rank, 4)
        group.all_reduce(x, out=x)
        if group.rank == 1:
            assert over.wait(LIMIT)
            return

        with pytest.raises(StoreTimeoutError, match=r"not every rank had come(?s:.*)late: rank 1"):
            group.all_reduce(x, out=x)

        over.set()

    on_ranks(body, timeout=1)


def test_the_callers_own_timeout_is_kept(planned):
    over = threading.Event()

    def body(group):
        x = part(group.rank, 4)
        group.all_reduce(x, out=x)
        if group.rank == 1:
            assert over.wait(LIMIT)
            return

        with pytest.raises(StoreTimeoutError):
            group.all_reduce(x, out=x, timeout=0.5)

        over.set()

    on_ranks(body)
    assert len(planned) == 3
