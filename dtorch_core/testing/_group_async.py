"""``async_op=True``: many in flight, and a Work that says what the blocking call would."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from dtorch_core._groups.work import Work
from dtorch_core.errors import AbortedError, CollectiveMismatchError, StoreTimeoutError, UnsupportedOperationError
from dtorch_core.group import ThreadGroup
from dtorch_core.testing._group_base import COLLECTIVES, EACH, SHORT, Collective, GroupConformance, coded, same
from dtorch_core.testing._harness import Background, asleep, requires, undeclared


class AsyncTests(GroupConformance):
    """The Work of a collective."""

    @requires("async")
    def test_async_has_the_methods_that_it_takes(self) -> None:
        self.has_methods_for("async", "without them the ranks tell each other their sizes in calls that block")

    @requires("async")
    @EACH
    def test_work_carries_what_the_blocking_call_returns(self, collective: Collective, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4, 2), group.device) for rank in range(2)]
            wanted = collective.wanted(xs, group.rank)
            work = collective.call(group, xs[group.rank], async_op=True)
            assert work.wait() is True
            assert work.wait(self.patience) is True
            assert work.wait(timedelta(seconds=self.patience)) is True
            assert work.is_completed()
            assert work.exception() is None
            assert same(work.result(), wanted)
            assert same(work.get_future().wait(), wanted)
            assert same(collective.call(group, xs[group.rank], async_op=True).result(), wanted)
            assert same(collective.call(group, xs[group.rank], async_op=True).get_future().wait(), wanted)

        self.ranks(body, 2, device)

    @requires("async")
    def test_work_of_a_barrier(self) -> None:
        begun = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                work = group.barrier(async_op=True)
                assert not work.is_completed()
                assert work.exception() is None
                begun.set()
                group.barrier(async_op=True).wait()
                assert work.result() is None
                assert work.get_future().wait() is None
            else:
                assert begun.wait(self.patience)
                group.barrier()
                group.barrier()

        self.ranks(body, 2)

    @requires("async")
    @EACH
    def test_call_returns_before_the_others_have_come(self, collective: Collective) -> None:
        come = threading.Event()
        only_gives = collective.name == "reduce"

        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4, 2), group.device) for rank in range(2)]
            if group.rank == 1:
                assert come.wait(self.patience)

            work = collective.call(group, xs[group.rank], async_op=True)
            if group.rank == 0:
                # Who only gives has done its part once that is on its way, where ranks need not meet.
                assert not work.is_completed() or (only_gives and "mismatch" not in self.declared)
                come.set()

            assert same(work.result(), collective.wanted(xs, group.rank))

        self.ranks(body, 2)

    @requires("async")
    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_many_in_flight_are_waited_for_in_any_order(self, world_size: int, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            kept = []
            for turn in range(8):
                for number, collective in enumerate(COLLECTIVES):
                    xs = [coded(100 * turn + 10 * number + rank, (4, 4), group.device) for rank in range(world_size)]
                    work = collective.call(group, xs[group.rank], async_op=True)
                    kept.append((collective, work, collective.wanted(xs, group.rank)))

            random.Random(group.rank).shuffle(kept)
            for collective, work, wanted in kept:
                assert same(work.result(), wanted), collective.name

        self.ranks(body, world_size, device)

    @requires("async")
    def test_large_and_small_in_flight(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            kept = []
            for turn in range(4):
                for size in (1_200_000, 2):
                    xs = [coded(turn + 10 * rank, (size,), group.device) for rank in range(2)]
                    for collective in COLLECTIVES[:6]:
                        work = collective.call(group, xs[group.rank], async_op=True)
                        kept.append((collective, work, collective.wanted(xs, group.rank)))

            for collective, work, wanted in reversed(kept):
                assert same(work.result(), wanted), collective.name

        self.ranks(body, 2, device)

    @requires("async")
    def test_work_that_is_dropped_ends_all_the_same(self) -> None:
        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4, 4), group.device) for rank in range(2)]
            for turn in range(5):
                for collective in COLLECTIVES:
                    if group.rank == turn % 2:
                        collective.call(group, xs[group.rank].clone(), async_op=True)
                    else:
                        assert same(collective.call(group, xs[group.rank]), collective.wanted(xs, group.rank))

            group.barrier()  # who leaves with calls under way breaks them

        self.ranks(body, 2)

    @requires("async")
    def test_work_may_be_waited_for_by_several_threads(self) -> None:
        waiting = [threading.Event() for _ in COLLECTIVES]

        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4, 4), group.device) for rank in range(2)]
            for number, collective in enumerate(COLLECTIVES):
                if group.rank == 1:
                    assert waiting[number].wait(self.patience)

                work = collective.call(group, xs[group.rank], async_op=True)
                threads = [Background(work.result) for _ in range(3)]
                if group.rank == 0:
                    for thread in threads:
                        asleep(thread)

                    waiting[number].set()

                for thread in threads:
                    assert same(thread.result(self.patience), collective.wanted(xs, group.rank))

        self.ranks(body, 2)

    @requires("async")
    def test_future_can_be_followed(self, device: str) -> None:
        looked = threading.Event()

        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4,), group.device) for rank in range(2)]
            if group.rank == 1:
                assert looked.wait(self.patience)

            future = group.all_reduce(xs[group.rank], async_op=True).get_future()
            if group.rank == 0:
                early = future.done()
                looked.set()
                assert not (early and "mismatch" in self.declared), "it is fulfilled, and rank 1 has not come"

            doubled = future.then(lambda done: done.value() * 2)
            assert same(doubled.wait(), 2 * (xs[0] + xs[1]))
            gathered = group.all_gather(xs[group.rank], async_op=True).get_future()
            called = threading.Event()
            gathered.add_done_callback(lambda _: called.set())
            assert called.wait(self.patience)
            assert same(gathered.wait(), torch.cat(xs))  # value() orders no stream

        self.ranks(body, 2, device)

    @requires("async", "mismatch")
    def test_work_of_a_mismatch_raises(self) -> None:
        def body(group: ThreadGroup) -> None:
            for call in (group.all_reduce, group.all_gather):
                for look in ("wait", "result", "future"):
                    work = call(coded(0, (2, 2 + group.rank), group.device), async_op=True)
                    with pytest.raises(CollectiveMismatchError, match="rank 1"):
                        _look(work, look)

                    assert work.is_completed()
                    assert isinstance(work.exception(), CollectiveMismatchError)

        self.ranks(body, 2)

    @requires("async")
    @pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
    def test_work_that_is_late_raises_at_its_deadline(self, name: str) -> None:
        self.needs_meeting(name)
        over = threading.Event()
        (collective,) = [c for c in COLLECTIVES if c.name == name]

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                assert over.wait(self.patience)
                return

            first = collective.call(group, coded(0, device=group.device), async_op=True)
            second = collective.call(group, coded(0, device=group.device), async_op=True, timeout=SHORT)
            future = first.get_future()
            with pytest.raises(StoreTimeoutError, match="rank 1"):
                second.wait()

            with pytest.raises((StoreTimeoutError, AbortedError), match="rank 0 gave up|rank 1"):
                first.wait(SHORT)

            with pytest.raises((StoreTimeoutError, AbortedError)):
                future.wait()

            over.set()

        self.ranks(body, 2, timeout=5)  # the first one's deadline, at which its future ends

    @undeclared("async")
    def test_async_is_refused(self) -> None:
        def body(group: ThreadGroup) -> None:
            for collective in COLLECTIVES:
                with pytest.raises(UnsupportedOperationError, match="async"):
                    collective.call(group, coded(0, (2, 2), group.device), async_op=True)

        self.ranks(body, 2)


def _look(work: Work[object], how: str) -> object:
    if how == "future":
        future: Any = work.get_future()
        return future.wait()

    return work.wait() if how == "wait" else work.result()
