"""spawn over processes: what goes to the ranks and comes back."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing import popen_spawn_posix
from pathlib import Path

import pytest
import torch

from dtorch_core import UnsupportedOperationError, refresh, spawn, use_backend
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import process_runs
    from process_runs import LIMIT, processes

ranks = process_runs.ranks
nothing_outlives_a_run = process_runs.nothing_outlives_a_run


class TestResults:
    def test_ranks_are_dealt_to_processes_in_order(self, ranks):
        results = processes(ranks.who, 3, "a", 2, threads_per_process=2, devices=["cpu", torch.device("cpu"), "cpu"])
        assert [result[:4] for result in results] == [(rank, 3, "cpu", f"rank {rank}") for rank in range(3)]
        assert [result[5] for result in results] == [("a", 2)] * 3
        first, second, third = (result[4] for result in results)
        assert first == second != third
        assert os.getpid() not in (first, third)

    @pytest.mark.parametrize("threads_per_process", [1, 2])
    def test_process_groups_make_no_more_connections(self, ranks, threads_per_process):
        """Each would cost the server of the rendezvous a query to a name server. A rank has one while it waits."""
        number = 6
        results = processes(
            ranks.connections_of_groups, 3, number, threads_per_process=threads_per_process, torch_distributed=True
        )
        for before, after, value in results:
            assert 0 < before <= after < before + threads_per_process
            assert value == 3.0 ** (number + 1)

    def test_ranks_open_what_they_share(self, ranks, site, monkeypatch):
        """They meet; arguments are each rank's own, by value; queues of multiprocessing may be among them."""
        site.backend("fake-dist", "fake", "Support.yes(1, 'it fits all')", plugin="fake")
        site.backend("other-dist", "other", plugin="other")
        refresh()
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        values, own_threads = torch.arange(100_000), torch.get_num_threads()
        queue = multiprocessing.get_context("spawn").Queue()
        torch.set_num_threads(6)
        try:
            with use_backend(store="fake"):
                results = processes(ranks.opened, 3, queue, values, "x")

            assert torch.get_num_threads() == 6
        finally:
            torch.set_num_threads(own_threads)

        said = dict(queue.get(timeout=LIMIT) for _ in range(3))
        queue.close()
        queue.join_thread()
        for rank, (topology, selection, changed, threads, manager, _) in enumerate(results):
            assert [member.pid for member in topology] == [said[other] for other in range(3)]
            assert topology.same_host and not topology.same_process and topology.same_device
            assert "fake (decided by use_backend)" in selection
            assert torch.equal(changed, torch.arange(100_000) + rank)
            assert threads == 2
            assert manager == (rank, 3)

        assert torch.equal(values, torch.arange(100_000))
        assert not values.is_shared()

    def test_tensors_come_by_value(self, ranks):
        results = processes(ranks.tensors, 2)
        for rank, result in enumerate(results):
            assert torch.equal(result["large"], torch.arange(25_000_000, dtype=torch.float32).add_(rank))
            assert torch.equal(result["view"], torch.arange(10, 13) + rank)
            assert result["view"].untyped_storage().nbytes() == 24
            assert result["conj"].tolist() == [1 - 2j, rank]
            assert result["neg"].tolist() == [-2]
            assert torch.equal(result["bfloat16"], torch.arange(4, dtype=torch.bfloat16))
            assert result["float8"].dtype is torch.float8_e4m3fn
            assert result["float8"].float().tolist() == [0, 1, 2, 3]
            assert result["grad"].tolist() == [0, 2, 4] and result["grad"].requires_grad and result["grad"].is_leaf
            assert result["scalar"].item() == rank
            assert result["empty"].shape == (0, 3)
            assert result["expanded"].tolist() == [[0, 1, 2]] * 2
            assert torch.equal(result["transposed"], torch.arange(6).reshape(2, 3).t())
            assert isinstance(result["parameter"], torch.nn.Parameter) and result["parameter"].tolist() == [0, 1]
            assert not any(value.is_shared() for value in result.values())

    def test_result_is_awaited_no_longer_than_its_process_needs(self, ranks):
        (pid,) = processes(ranks.quiet, 1)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_time_limit_of_a_year(self, ranks):
        (pid,) = spawn(ranks.quiet, 1, ranks_as="processes", timeout=365 * 86400.0)
        assert pid != os.getpid()

    @pytest.mark.parametrize("ranks_as", ["threads", "processes"])
    def test_spawn_within_a_rank(self, ranks, ranks_as):
        ((outer, inner),) = processes(ranks.nests, 1, ranks_as)
        assert [result[0] for result in inner] == [0, 1]
        assert len({outer, *(result[4] for result in inner)}) == (1 if ranks_as == "threads" else 3)

    def test_kit_runs_functions_over_processes(self, ranks):
        results = run_ranks(ranks.who, 3, LIMIT, args=("a",), ranks_as="processes", threads_per_process=3)
        assert len({result[4] for result in results}) == 1
        assert [result[0] for result in results] == [0, 1, 2]


class TestArguments:
    def test_what_can_not_be_pickled_is_named_before_anything_starts(self, ranks, monkeypatch):
        def local(ctx): ...

        started = []
        monkeypatch.setattr(popen_spawn_posix.util, "spawnv_passfds", lambda *_: started.append(1))
        for fn, args, said in (
            (lambda ctx: None, (), r"fn, .*<lambda> \(.*_processes.py:\d+\), is a lambda, .* at a module's level"),
            (local, (), r"fn, .*local \(.*:\d+\), is a local function, which can't be pickled"),
            (ranks.who, (1, threading.Lock()), r"args\[1\], a _thread.lock, can't be pickled .*cannot pickle"),
            (ranks.who, ([lambda: 0],), r"args\[0\], a list, can't be pickled .*<lambda>"),
            (Callable(threading.Lock()), (), r"fn, a .*Callable, can't be pickled"),
        ):
            with pytest.raises(TypeError, match=said):
                processes(fn, 2, *args)

        assert started == []

    def test_function_that_was_typed_in_is_refused(self):
        code = "from dtorch_core import spawn\ndef f(ctx): ...\nspawn(f, 2, ranks_as='processes')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
        assert "TypeError: spawn: fn, f (<string>:2), was typed into an interpreter" in done.stderr

    def test_daemonic_process_is_refused(self, ranks, monkeypatch):
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
        with pytest.raises(UnsupportedOperationError, match="daemonic process of multiprocessing, which may not have"):
            processes(ranks.who, 2)


class Callable:
    def __init__(self, lock):
        self.lock = lock

    def __call__(self, ctx): ...
