"""Which communicators may be made and taken down at once."""

import gc
import importlib.util
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dtorch_nccl_group import traffic
from dtorch_nccl_group.traffic import Traffic

from dtorch_core import PeerLostError, open_group
from dtorch_core.extras import companion
from dtorch_core.testing import Background, asleep, run_ranks

_spec = importlib.util.spec_from_file_location("nccl_ranks", Path(__file__).with_name("nccl_ranks.py"))
nccl_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(nccl_ranks)

LIMIT = 20.0


def inside(context, came, leave):
    with context:
        came.wait(LIMIT)
        assert leave.wait(LIMIT)


KINDS = {"making": lambda here: here.making(LIMIT), "ending": Traffic.ending}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_many_of_a_kind_go_on_at_once(kind):
    here, came, leave = Traffic(), threading.Barrier(3), threading.Event()
    others = [Background(lambda: inside(kind(here), came, leave)) for _ in range(2)]
    came.wait(LIMIT)
    leave.set()
    for other in others:
        other.result(LIMIT)


@pytest.mark.parametrize(("first", "second"), [("making", "ending"), ("ending", "making")])
def test_one_kind_waits_for_the_other(monkeypatch, first, second):
    monkeypatch.setattr(traffic, "PATIENCE", LIMIT)
    here, came, leave = Traffic(), threading.Barrier(2), threading.Event()
    order = []
    one = Background(lambda: inside(KINDS[first](here), came, leave))
    came.wait(LIMIT)

    def late():
        with KINDS[second](here):
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
    with here.making(0.05), here.ending():
        pass

    with here.ending(), here.making(0.05):
        pass


def opened(here):
    """As one rank has a group."""
    handle = object()
    here.opened(handle)
    return handle


class TestLeaving:
    def test_the_last_group_takes_all_down_at_once(self):
        here, ended = Traffic(), []
        groups, there = [opened(here) for _ in range(4)], threading.Barrier(4, timeout=LIMIT)
        for number, group in enumerate(groups):
            assert ended == []
            here.left(group, lambda number=number: (there.wait(), ended.append(number)))

        assert sorted(ended) == [0, 1, 2, 3]

    def test_one_that_is_down_already_is_no_reason_to_wait(self):
        here, ended = Traffic(), []
        first, second = opened(here), opened(here)
        here.left(first, lambda: ended.append("first"))
        assert ended == []
        here.left(second)
        assert ended == ["first"]
        here.left(second)
        assert ended == ["first"]

    def test_a_rank_by_itself_waits_for_none(self):
        here, ended = Traffic(), []
        here.left(object(), lambda: ended.append("alone"))
        assert ended == ["alone"]

    def test_a_group_that_is_opened_when_ends_are_due_waits_for_them(self, monkeypatch):
        """Also where they have to wait for others: its kernels would run by the time that they begin."""
        monkeypatch.setattr(traffic, "PATIENCE", LIMIT)
        here, order = Traffic(), []
        came, leave = threading.Barrier(2), threading.Event()
        earlier = Background(lambda: inside(here.making(LIMIT), came, leave))
        came.wait(LIMIT)
        ending = Background(lambda: here.left(object(), lambda: order.append("end")))
        asleep(ending)

        def open_next():
            opened(here)
            with here.making(LIMIT):
                order.append("next")

        following = Background(open_next)
        asleep(following)
        leave.set()
        for each in (earlier, ending, following):
            each.result(LIMIT)

        assert order == ["end", "next"]

    def test_an_end_that_fails_keeps_the_others_from_nothing(self):
        here, ended = Traffic(), []
        groups = [opened(here) for _ in range(2)]

        def fail():
            raise RuntimeError("on purpose")

        here.left(groups[0], fail)
        here.left(groups[1], lambda: ended.append("end"))
        assert ended == ["end"]


class Thing:
    """A group, or the backend of one."""


class TestKeeping:
    """What is collected may wait for kernels, so it is not in whichever rank collects."""

    def test_a_backend_is_kept_while_a_group_is_open(self):
        here, group, backend = Traffic(), Thing(), Thing()
        other, kept = opened(here), weakref.ref(backend)
        here.keep(group, backend)
        del group, backend
        assert kept() is not None
        here.left(other)
        assert kept() is None

    def test_it_is_kept_as_long_as_its_group(self):
        here, group, backend = Traffic(), Thing(), Thing()
        kept = weakref.ref(backend)
        here.keep(group, backend)
        del backend
        here.left(opened(here))
        assert kept() is not None

    def test_it_goes_with_its_group_in_a_thread_of_its_own(self):
        here, group, backend, gone = Traffic(), Thing(), Thing(), threading.Event()
        where = []
        weakref.finalize(backend, lambda: (where.append(threading.get_ident()), gone.set()))
        here.keep(group, backend)
        del backend
        del group
        assert gone.wait(LIMIT)
        assert where != [threading.get_ident()]

    def test_collecting_a_closed_group_collects_no_backend_of_it(self):
        """Of ranks that have another one."""
        gone = threading.Semaphore(0)

        def rank(ctx):
            with ctx.open_group("kept", backend="gloo", timeout=LIMIT) as kept:
                group = ctx.open_group("closed", backend="gloo", timeout=LIMIT)
                backend = group.process_group._get_backend(torch.device("cpu"))
                weakref.finalize(backend, gone.release)
                closed = weakref.ref(group)
                group.close()
                circle = [group]
                circle.append(circle)
                del circle, group, backend
                kept.barrier()
                if ctx.rank == 0:  # two can't collect at once
                    gc.collect()

                kept.barrier()
                assert closed() is None
                assert not gone.acquire(blocking=False)
                kept.barrier()

        with nccl_ranks.over_gloo():
            run_ranks(rank, 2, 2 * LIMIT)

        for _ in range(2):
            assert gone.acquire(timeout=LIMIT)


def test_groups_of_thread_ranks_keep_their_communicators_until_the_last_is_closed(monkeypatch):
    """One rank closes a group while the other is at a call of another one, and closes it later."""
    ended, left = [], threading.Barrier(2, timeout=LIMIT)

    class Counted(dist.ProcessGroupGloo):
        def shutdown(self):
            ended.append(self)
            super().shutdown()

    monkeypatch.setattr(nccl_ranks, "made", lambda store, rank, size, *_, **__: Counted(store, rank, size))

    def rank(ctx):
        with ctx.open_group("kept", backend="gloo", timeout=LIMIT) as kept:
            with ctx.open_group("closed", backend="gloo", timeout=LIMIT) as closed:
                assert closed.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
                if ctx.rank == 1:
                    left.wait()
                    assert kept.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]

            if ctx.rank == 0:
                left.wait()
                assert kept.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]

            kept.barrier()
            assert ended == []
            kept.barrier()

    with nccl_ranks.over_gloo():
        run_ranks(rank, 2, 2 * LIMIT)

    assert len(ended) == 4


def test_a_group_that_a_rank_forgets_keeps_no_communicator(monkeypatch):
    """Of ranks that were started by hand: nobody closes it for them."""
    ended = threading.Event()

    class Counted(dist.ProcessGroupGloo):
        def shutdown(self):
            super().shutdown()
            ended.set()

    monkeypatch.setattr(nccl_ranks, "made", lambda store, rank, size, *_, **__: Counted(store, rank, size))

    def rank(number):
        group = open_group("forgotten", rank=number, world_size=2, backend="gloo", timeout=LIMIT)
        group.barrier()
        if number == 0:
            group.close()

    with nccl_ranks.over_gloo():
        ranks = [Background(partial(rank, number)) for number in range(2)]
        for one in ranks:
            one.result(LIMIT)

        gc.collect()
        assert ended.wait(LIMIT)


@pytest.mark.parametrize("queued", [False, True])
def test_a_rank_that_forgets_a_group_and_returns_leaves_it_in_good_order(monkeypatch, queued):
    """Its peers hear how far it has come: what it took part in ends well, however late they are."""

    def rank(ctx):
        group = ctx.open_group("forgotten", backend="gloo", timeout=LIMIT)
        beside, heard = companion(group.process_group), threading.Event()
        on_leaving = beside._on_leaving
        monkeypatch.setattr(beside, "_on_leaving", lambda *said: (on_leaving(*said), heard.set()), raising=False)
        group.barrier()
        if ctx.rank == 0:
            return

        assert heard.wait(LIMIT)
        assert beside._over is None
        with pytest.raises(PeerLostError, match="after its call #1"):
            group.broadcast(torch.ones(3), 0)

    with nccl_ranks.over_gloo(queued=queued):
        run_ranks(rank, 2, 2 * LIMIT)


def test_close_waits_for_who_closes_the_group_already(monkeypatch):
    """A forgotten one is closed by a thread that nobody knows."""
    closing, go_on, gone = threading.Event(), threading.Event(), []

    class Slow(dist.ProcessGroupGloo):
        def shutdown(self):
            closing.set()
            assert go_on.wait(LIMIT)
            super().shutdown()
            gone.append(self.rank())

    monkeypatch.setattr(nccl_ranks, "made", lambda store, rank, size, *_, **__: Slow(store, rank, size))

    def rank(ctx):
        group = ctx.open_group(backend="gloo", timeout=LIMIT)
        first = Background(group.close)
        assert closing.wait(LIMIT)
        second = Background(companion(group.process_group).close)
        asleep(second)
        assert second.thread.is_alive()
        go_on.set()
        second.result(LIMIT)
        assert gone == [0]
        first.result(LIMIT)

    with nccl_ranks.over_gloo():
        run_ranks(rank, 1, 2 * LIMIT)


class Interrupted:
    """A lock. What happens when it has been given back for the nth time happens before anything else."""

    def __init__(self, lock, number, action):
        self.lock, self.number, self.action = lock, number, action

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()
        self.number -= 1
        if self.number == 0:
            self.action()


@pytest.mark.parametrize("number", [1, 2])
def test_close_waits_for_an_abort_that_has_just_begun(monkeypatch, number):
    """Whenever it comes."""
    ended, known, done = [], [], threading.Event()

    class Counted(dist.ProcessGroupGloo):
        def abort(self):
            super().abort()
            ended.append(self.rank())

    monkeypatch.setattr(nccl_ranks, "made", lambda store, rank, size, *_, **__: Counted(store, rank, size))

    def rank(ctx):
        group = ctx.open_group("closed", backend="gloo", timeout=LIMIT)
        group.barrier()
        if ctx.rank == 1:
            assert done.wait(LIMIT)
            return

        beside = companion(group.process_group)

        def close():
            group.close()
            known.append(0 in ended)

        beside._lock = Interrupted(beside._lock, number, close)
        beside.abort()
        done.set()

    with nccl_ranks.over_gloo():
        run_ranks(rank, 2, 2 * LIMIT)

    assert known == [True]
