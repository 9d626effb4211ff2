"""spawn: ranks as threads, their results, and what they and their threads are given."""

import threading
from pathlib import Path

import pytest
import torch

import dtorch_core
from dtorch_core import RankFailedError, UnsupportedOperationError, spawn
from dtorch_core.testing import Background, run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import thread_runs
    from thread_runs import LIMIT

driver = thread_runs.driver
nothing_outlives_a_run = thread_runs.nothing_outlives_a_run


class TestResults:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
    def test_results_come_by_rank(self, world_size):
        assert spawn(lambda ctx: ctx.rank * 10, world_size) == [rank * 10 for rank in range(world_size)]

    def test_context_says_who_the_rank_is(self):
        seen = spawn(lambda ctx: (ctx.rank, ctx.world_size, ctx.device, threading.current_thread().name), 2)
        assert seen == [(0, 2, "cpu", "rank 0"), (1, 2, "cpu", "rank 1")]

    def test_args_go_to_every_rank(self):
        assert spawn(lambda ctx, a, b: (a, b, ctx.rank), 2, args=("a", 2)) == [("a", 2, 0), ("a", 2, 1)]

    def test_threads_have_ended_when_spawn_returns(self):
        before = set(threading.enumerate())
        for _ in range(30):
            spawn(lambda ctx: None, 4)
            assert set(threading.enumerate()) <= before

    def test_ranks_meet_in_a_store(self):
        def rank(ctx):
            store = ctx.open_store("k", timeout=LIMIT)
            store.src_set(f"{ctx.rank}", torch.arange(3) + 10 * ctx.rank, 1)
            got = store.dest_get_to_device(f"{(ctx.rank + 1) % 3}", "cpu")
            store.src_wait_until_get_finished(f"{ctx.rank}")
            return got.tolist()

        assert spawn(rank, 3) == [[10, 11, 12], [20, 21, 22], [0, 1, 2]]

    def test_two_runs_at_once_may_use_the_same_names(self):
        def rank(ctx, run):
            store = ctx.open_store("same", timeout=LIMIT)
            for turn in range(20):
                if ctx.rank == 0:
                    with store.publish("k", torch.tensor([run, turn]), 1):
                        pass
                else:
                    assert store.dest_get_to_device("k", "cpu").tolist() == [run, turn]

            return run

        runs = [Background(lambda run=run: spawn(rank, 2, args=(run,))) for run in range(3)]
        assert [run.result() for run in runs] == [[0, 0], [1, 1], [2, 2]]

    def test_spawn_within_a_rank(self):
        def inner(ctx, outer):
            with ctx.open_store("same", timeout=LIMIT) as store:
                store.barrier()
                return outer, ctx.rank

        def rank(ctx):
            with ctx.open_store("same", timeout=LIMIT) as store:
                results = spawn(inner, 2, args=(ctx.rank,))
                store.barrier()
                return results

        assert spawn(rank, 2) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


class TestHandles:
    def test_what_a_rank_left_open_is_closed_last_opened_first(self):
        closed = []

        class Handle:
            def __init__(self, number):
                self.number = number

            def abort(self, reason, *, died=False):
                raise AssertionError(reason)

            def close(self):
                closed.append(self.number)

        handles = [Handle(number) for number in range(50)]

        def rank(ctx):
            for handle in handles:
                ctx._scope.add(handle)

        run_ranks(rank, 1)
        assert closed == list(range(49, -1, -1))


class TestSettings:
    @pytest.fixture(autouse=True)
    def intra_op_threads(self, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        before = torch.get_num_threads()
        torch.set_num_threads(4)
        yield
        assert torch.get_num_threads() == 4
        assert Background(torch.get_num_threads).result() == 4  # of new threads, too
        torch.set_num_threads(before)

    @pytest.mark.parametrize(("world_size", "each"), [(1, 4), (2, 2), (3, 1), (8, 1)])
    def test_intra_op_threads_are_divided_and_restored(self, world_size, each):
        assert spawn(lambda ctx: torch.get_num_threads(), world_size) == [each] * world_size

    def test_intra_op_threads_are_left_alone_where_omp_num_threads_is_set(self, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert spawn(lambda ctx: torch.get_num_threads(), 2) == [4, 4]

    def test_intra_op_threads_are_restored_after_a_failure(self):
        with pytest.raises(RankFailedError):
            spawn(lambda ctx: 1 / 0, 2)

    def test_intra_op_threads_are_restored_after_runs_that_overlap(self):
        def rank(ctx, mine, other):
            mine.set()
            assert other.wait(LIMIT)

        first, second = threading.Event(), threading.Event()
        runs = [
            Background(lambda: spawn(rank, 2, args=(first, second))),
            Background(lambda: spawn(rank, 4, args=(second, first))),
        ]
        for run in runs:
            run.result()

    def test_intra_op_threads_of_a_nested_run(self):
        def rank(ctx):
            inner = spawn(lambda ctx: torch.get_num_threads(), 2)
            return inner, torch.get_num_threads()

        assert spawn(rank, 2) == [([1, 1], 2)] * 2


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"fn": None}, TypeError, "fn must be callable"),
            ({"world_size": 0}, ValueError, "at least 1"),
            ({"world_size": True}, ValueError, "at least 1"),
            ({"world_size": 2.0}, ValueError, "at least 1"),
            ({"ranks_as": "fibers"}, ValueError, "'threads' or 'processes'"),
            ({"args": 5}, TypeError, r"args must be a sequence .* not 5"),
            ({"args": "ab"}, TypeError, r"args must be a sequence .* not 'ab'"),
            ({"rng": "own"}, ValueError, "'shared' or 'per-rank'"),
            ({"threads_per_process": 2}, UnsupportedOperationError, "threads_per_process is for ranks_as='processes'"),
            ({"threads_per_process": 0}, ValueError, "threads_per_process must be an int of at least 1, not 0"),
            ({"threads_per_process": True}, ValueError, "threads_per_process must be an int of at least 1"),
            ({"devices": ["cpu"]}, ValueError, "names 1 device for 2 ranks"),
            ({"devices": "tpu:0"}, ValueError, "tpu"),
            ({"devices": "banana"}, ValueError, "device 'banana': a rank's is 'cpu' or 'cuda:N'"),
            ({"devices": "mps"}, ValueError, "'cpu' or 'cuda:N'"),
        ],
        ids=repr,
    )
    def test_wrong_arguments_are_refused(self, arguments, error, match):
        with pytest.raises(error, match=match):
            spawn(**{"fn": lambda ctx: None, "world_size": 2, **arguments})

    @pytest.mark.parametrize(
        "devices", [None, "cpu", torch.device("cpu"), ["cpu", torch.device("cpu")], ("cpu", "cpu")]
    )
    def test_devices_are_one_for_all_or_one_each(self, devices):
        assert spawn(lambda ctx: ctx.device, 2, devices=devices) == ["cpu", "cpu"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
    def test_device_that_is_not_there_is_refused(self):
        with pytest.raises(ValueError, match="sees no CUDA device"):
            spawn(lambda ctx: None, 2, devices="cuda:0")

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    def test_device_of_a_rank_is_its_current_device(self):
        last = f"cuda:{torch.cuda.device_count() - 1}"

        def rank(ctx):
            return ctx.device, torch.empty(1, device="cuda").device.index

        assert spawn(rank, 2, devices=["cuda", last]) == [("cuda:0", 0), (last, torch.cuda.device_count() - 1)]

    def test_group_of_wrong_ranks_is_refused(self):
        def rank(ctx):
            for ranks in ([0, 0], [2], [-1], []):
                with pytest.raises(ValueError, match="different ones of 0 to 1, at least one, not"):
                    ctx.open_group("g", ranks)

            for ranks in (5, "01"):
                with pytest.raises(TypeError, match="must be a sequence of ranks, not"):
                    ctx.open_group("g", ranks)

        run_ranks(rank, 2, LIMIT)

    def test_spawn_is_public(self):
        assert dtorch_core.spawn is spawn
