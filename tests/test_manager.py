"""ThreadGroupManager: one group for each combination of ranks, made once, shared, and closed in one order."""

import gc
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dtorch_core
from dtorch_core import (
    AbortedError,
    DtorchError,
    NoBackendError,
    PeerLostError,
    RankFailedError,
    StoreTimeoutError,
    ThreadGroup,
    ThreadGroupManager,
    open_group,
)
from dtorch_core._meeting import board as _board
from dtorch_core.testing import Background, asleep, run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from opening_ranks import free_port

LIMIT = 15.0


def on_ranks(body, world_size=4, **options):
    """``body(manager)`` on every rank."""

    def rank(ctx):
        with ctx.open_manager(**{"timeout": LIMIT} | options) as manager:
            return body(manager)

    return run_ranks(rank, world_size, 2 * LIMIT)


def total_of(group, members, me):
    """The group works, and is one of ``members`` in that order."""
    assert (group.rank, group.world_size) == (members.index(me), len(members))
    gathered = group.all_gather(torch.tensor([10 * me]))
    assert gathered.tolist() == [10 * member for member in members]
    return int(group.all_reduce(torch.tensor(me)))


class TestGroups:
    def test_group_is_made_once_and_shared(self):
        def body(manager):
            group = manager.get([0, 1, 2, 3])
            assert isinstance(group, ThreadGroup)
            assert manager.get((0, 1, 2, 3)) is group
            assert manager.get(range(4)) is group
            assert manager.get(torch.arange(4)) is group
            assert total_of(group, [0, 1, 2, 3], manager.rank) == 6

        on_ranks(body)

    def test_order_of_the_ranks_makes_another_group(self):
        def body(manager):
            forth, back = manager.get([0, 1]), manager.get([1, 0])
            assert forth is not back
            total_of(forth, [0, 1], manager.rank)
            total_of(back, [1, 0], manager.rank)

        on_ranks(body, 2)

    def test_only_the_members_need_to_ask(self):
        """And they may do so in any order: opening one group does not wait for another."""

        def body(manager):
            wanted = {0: [[0, 1], [0, 2]], 1: [[0, 1], [1, 3, 2]], 2: [[1, 3, 2], [0, 2]], 3: [[1, 3, 2]]}[manager.rank]
            calls = [lambda ranks=ranks: total_of(manager.get(ranks), ranks, manager.rank) for ranks in wanted]
            return [thread.result(LIMIT) for thread in [Background(call) for call in calls]]

        assert on_ranks(body) == [[1, 2], [1, 6], [6, 2], [6]]

    def test_group_of_one(self):
        def body(manager):
            return total_of(manager.get([manager.rank]), [manager.rank], manager.rank)

        assert on_ranks(body, 3) == [0, 1, 2]

    def test_many_threads_get_one_group(self):
        def body(manager):
            start = threading.Barrier(8)

            def ask():
                start.wait(LIMIT)
                return manager.get([2, 0, 1])

            threads = [Background(ask) for _ in range(8)]
            groups = {id(thread.result(LIMIT)) for thread in threads}
            assert len(groups) == 1
            assert total_of(manager.get([2, 0, 1]), [2, 0, 1], manager.rank) == 3

        on_ranks(body, 3)

    def test_ranks_that_are_not_there_are_refused(self):
        def body(manager):
            for ranks in ([0, 0], [0, 2], [-1, 0], []):
                with pytest.raises(ValueError, match="ThreadGroupManager 'manager' rank .* needs different ranks"):
                    manager.get(ranks)

            with pytest.raises(ValueError, match=f"this rank is not one of rank {1 - manager.rank}"):
                manager.get([1 - manager.rank])

            with pytest.raises((TypeError, ValueError)):
                manager.get(["first"])

        on_ranks(body, 2)

    def test_rank_of_the_manager_must_exist(self):
        with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
            ThreadGroupManager(2, 2)

    def test_managers_of_different_names_do_not_meet(self):
        def rank(ctx):
            one, other = ctx.open_manager("one", timeout=LIMIT), ctx.open_manager("other", timeout=LIMIT)
            with one, other:
                groups = [manager.get([0, 1]) for manager in (one, other)]
                assert groups[0] is not groups[1]
                works = [group.all_reduce(torch.tensor(ctx.rank + 1), async_op=True) for group in groups]
                assert [int(work.result()) for work in reversed(works)] == [3, 3]

        run_ranks(rank, 2, 2 * LIMIT)

    def test_options_reach_the_groups(self):
        def body(manager):
            group = manager.get([0, 1])
            assert group.backend == "samedevice"
            assert group.selection.asked_by == "argument"
            assert group.timeout == 7.5

        on_ranks(body, 2, backend="samedevice", timeout=7.5)

    def test_manager_without_a_launcher(self):
        def member(rank):
            with ThreadGroupManager(rank, 2, name="alone", timeout=LIMIT) as manager:
                return total_of(manager.get([0, 1]), [0, 1], rank)

        threads = [Background(lambda rank=rank: member(rank)) for rank in range(2)]
        assert [thread.result(2 * LIMIT) for thread in threads] == [1, 1]


class TestMeshes:
    def test_groups_of_every_dimension(self):
        mesh = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]

        def body(manager):
            found = []
            for dim in (0, 1, 2):
                group = manager.groups_for(mesh, dim)
                assert manager.groups_for(torch.tensor(mesh), dim - 3) is group
                found.append(group.all_gather(torch.tensor([manager.rank])).tolist())

            return found

        results = on_ranks(body, 8)
        assert results[0] == [[0, 4], [0, 2], [0, 1]]
        assert results[5] == [[1, 5], [5, 7], [4, 5]]

    def test_flat_mesh_is_the_world(self):
        def body(manager):
            assert manager.groups_for([2, 0, 1]) is manager.get([2, 0, 1])

        on_ranks(body, 3)

    def test_rank_outside_the_mesh_is_refused(self):
        def body(manager):
            if manager.rank == 2:
                with pytest.raises(ValueError, match="rank 2 is not in the"):
                    manager.groups_for([0, 1])
            else:
                total_of(manager.groups_for([0, 1]), [0, 1], manager.rank)

            with pytest.raises((TypeError, ValueError)):
                manager.groups_for([[0, 1, 2]], 2)

        on_ranks(body, 3)


class TestEnd:
    def test_close_closes_every_group_in_one_order_and_can_be_repeated(self, monkeypatch):
        closed = []
        close = ThreadGroup.close

        def recorded(group):
            closed.append((threading.current_thread().name, group.name))
            close(group)

        def body(manager):
            order = [[0, 1, 2], [2, 1, 0], [1, 0, 2]]
            threads = [Background(lambda ranks=ranks: manager.get(ranks)) for ranks in order]
            groups = [thread.result(LIMIT) for thread in threads]
            groups[0].barrier()
            manager.close()
            manager.close()
            for group in groups:
                with pytest.raises((AbortedError, PeerLostError)):
                    group.barrier()

        monkeypatch.setattr(ThreadGroup, "close", recorded)
        on_ranks(body, 3)
        for rank in range(3):
            names = [name for thread, name in closed if thread == f"rank {rank}"]
            assert names[:3] == sorted(set(names)), "each rank closes its groups in the same order"

    def test_closed_manager_gives_no_groups(self):
        def body(manager):
            manager.close()
            with pytest.raises(AbortedError, match="is closed"):
                manager.get([0, 1])

        on_ranks(body, 2)

    def test_close_does_not_wait_for_a_group_that_is_being_opened(self):
        closed = threading.Event()

        def body(manager):
            if manager.rank == 1:
                assert closed.wait(LIMIT)
                with pytest.raises((StoreTimeoutError, PeerLostError)):
                    manager.get([0, 1]).barrier(timeout=1)

                return

            asking = Background(lambda: manager.get([0, 1]))
            asleep(asking)
            begun = time.monotonic()
            manager.close()
            assert time.monotonic() - begun < LIMIT / 3
            closed.set()
            with pytest.raises(AbortedError, match="was closed while"):
                asking.result(LIMIT)

        on_ranks(body, 2)

    def test_failed_opening_is_told_to_all_who_asked_and_tried_again(self):
        def body(manager):
            if manager.rank == 0:
                asking = [Background(lambda: manager.get([0, 1])) for _ in range(3)]
                for thread in asking:
                    with pytest.raises(StoreTimeoutError, match="rank 1"):
                        thread.result(LIMIT)

        on_ranks(body, 2, timeout=0.3)

        def named(manager):
            for _ in range(2):
                with pytest.raises(NoBackendError, match="nonesuch"):
                    manager.get([0, 1])

        on_ranks(named, 2, backend="nonesuch")

    def test_block_that_raises_wakes_the_peers(self):
        waiting = threading.Event()

        def rank(ctx):
            if ctx.rank == 1:
                with pytest.raises(ZeroDivisionError), ctx.open_manager(timeout=60) as manager:
                    manager.get([0, 1]).barrier()
                    assert waiting.wait(LIMIT)
                    raise ZeroDivisionError("on purpose")
            else:
                with ctx.open_manager(timeout=60) as manager:
                    group = manager.get([0, 1])
                    group.barrier()
                    call = Background(group.barrier)
                    asleep(call)
                    waiting.set()
                    with pytest.raises(PeerLostError, match="rank 1 failed: ZeroDivisionError: on purpose"):
                        call.result(LIMIT)

        run_ranks(rank, 2, 2 * LIMIT)

    def test_failing_rank_wakes_groups_that_other_threads_opened(self):
        """They belong to the rank, whichever of its threads asked."""
        waiting = threading.Event()
        seen = []

        def rank(ctx):
            manager = ctx.open_manager(timeout=60)
            group = Background(lambda: manager.get([0, 1])).result(LIMIT)
            part = Background(lambda: group.split([0, 1])).result(LIMIT)
            group.barrier()
            if ctx.rank == 1:
                assert waiting.wait(LIMIT)
                raise ZeroDivisionError("on purpose")

            calls = [Background(group.barrier), Background(part.barrier)]
            for call in calls:
                asleep(call)

            waiting.set()
            for call in calls:
                with pytest.raises(PeerLostError, match="rank 1"):
                    call.result(LIMIT)

                seen.append(call)

        with pytest.raises(RankFailedError, match="rank 1 of 2 failed with ZeroDivisionError"):
            run_ranks(rank, 2, 2 * LIMIT)

        assert len(seen) == 2

    def test_groups_of_a_manager_are_apart_from_groups_opened_by_hand(self):
        def rank(ctx):
            with ctx.open_manager(timeout=LIMIT) as manager:
                with ctx.open_group("by hand", timeout=LIMIT) as by_hand:
                    assert manager.get([0, 1]) is not by_hand
                    manager.close()
                    assert int(by_hand.all_reduce(torch.tensor(1))) == 2

        run_ranks(rank, 2, 2 * LIMIT)


class TestRendezvous:
    """Of all ranks of the manager, whichever of them open a group. (test_manager_processes.py: between processes.)"""

    def test_rank_0_serves_it_from_the_start(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            with pytest.raises(DtorchError, match=f"rank 0 can't serve the rendezvous at 127.0.0.1:{port}"):
                ThreadGroupManager(0, 2, rendezvous=f"tcp://127.0.0.1:{port}", timeout=LIMIT)

        with ThreadGroupManager(0, 2, rendezvous=f"tcp://127.0.0.1:{port}", timeout=LIMIT):
            limit = timedelta(seconds=LIMIT)
            assert not dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False).check(["x"])

    def test_nobody_serves_it(self):
        url = f"tcp://127.0.0.1:{free_port()}"
        with (
            ThreadGroupManager(1, 3, rendezvous=url, timeout=0.3) as manager,
            pytest.raises(StoreTimeoutError, match=f"no rendezvous at {url[6:]} within 0.3 s.*Is rank 0 up"),
        ):
            manager.get([1, 2])

    def test_connections_are_kept_until_the_manager_is_closed(self):
        port = free_port()
        place = f"127.0.0.1:{port}"
        managers = [ThreadGroupManager(rank, 3, rendezvous=f"tcp://{place}", timeout=LIMIT) for rank in range(3)]
        managers[0].close()
        gc.collect()
        assert place not in _board._at
        for thread in [Background(lambda manager=manager: manager.get([2, 1]).close()) for manager in managers[1:]]:
            thread.result(LIMIT)

        gc.collect()
        kept = _board._at[place]
        managers[1].close()
        gc.collect()
        assert _board._at[place] is kept
        del kept
        managers[2].close()
        gc.collect()
        assert place not in _board._at

    def test_group_of_one_needs_none(self):
        with ThreadGroupManager(1, 2, rendezvous=f"tcp://127.0.0.1:{free_port()}", timeout=0.3) as manager:
            assert total_of(manager.get([1]), [1], 1) == 1

    @pytest.mark.parametrize(
        ("rank", "ranks", "missing", "told"),
        [
            (3, [2, 3], 0, r" \(the group's ranks are, in this order, ranks \[2, 3\] of the manager 'late'\)"),
            (3, [3, 1], 1, r" \(the group's ranks are, in this order, ranks \[3, 1\] of the manager 'late'\)"),
            (0, [0, 1], 1, ""),
        ],
    )
    def test_failed_opening_tells_the_managers_ranks(self, rank, ranks, missing, told):
        match = f"gave up after 0.3 s: rank {missing} had not come.*timeout{told}$"
        with (
            ThreadGroupManager(rank, 4, name="late", timeout=0.3) as manager,
            pytest.raises(StoreTimeoutError, match=match),
        ):
            manager.get(ranks)

    @pytest.mark.parametrize("timeout", [0, float("inf"), "1"])
    def test_timeout_is_looked_at_first(self, timeout):
        with pytest.raises(ValueError, match="ThreadGroupManager 'manager': timeout must be a finite number"):
            ThreadGroupManager(0, 2, rendezvous="tcp://127.0.0.1:1", timeout=timeout)


def test_names_are_public():
    assert dtorch_core.ThreadGroupManager is ThreadGroupManager
    assert dtorch_core.open_group is open_group
