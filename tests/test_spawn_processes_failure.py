"""spawn over processes: how a run ends whatever becomes of a rank or of its process."""

from __future__ import annotations

import multiprocessing
import re
import time
from pathlib import Path

import pytest

from dtorch_core import DtorchError, RankFailedError, StoreTimeoutError
from dtorch_core._spawn.processes import ProcessRun
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import process_runs
    from process_runs import LIMIT, PROMPT, processes

ranks = process_runs.ranks
nothing_outlives_a_run = process_runs.nothing_outlives_a_run


class TestFailure:
    def test_first_failure_ends_the_run_with_its_rank_and_traceback(self, ranks):
        with pytest.raises(RankFailedError) as caught:
            processes(ranks.fails, 3, threads_per_process=2)

        assert caught.value.rank == 1
        text = str(caught.value)
        assert text.startswith("rank 1 of 3 failed with ValueError: with a lock\n\nTraceback of rank 1 (pid ")
        for part in ("in fails", "KeyError: 'the cause'\n"):
            assert part in text

        assert "did not return" not in text
        # It has a lock, so it can't come itself; its cause can.
        assert type(caught.value.__cause__) is DtorchError
        assert str(caught.value.__cause__) == "ValueError: with a lock"
        assert isinstance(caught.value.__cause__.__cause__, KeyError)

    @pytest.mark.parametrize(
        ("how", "said", "cause"),
        [
            ("odd", "OddError: this and that", DtorchError),
            ("exit", "SystemExit: 5", SystemExit),
            ("result", "TypeError: what rank 0 returned, a list, can't be pickled for the process .*lock", TypeError),
        ],
    )
    def test_rank_that_fails_in_an_odd_way(self, ranks, how, said, cause):
        with pytest.raises(RankFailedError, match=f"^rank 0 of 1 failed with {said}") as caught:
            processes(ranks.fails_oddly, 1, how)

        assert type(caught.value.__cause__) is cause

    @pytest.mark.parametrize(
        ("how", "world_size", "per_process", "said"),
        [
            ("kill", 4, 2, r"rank 2, rank 3 of 4 \(pid \d+\) were killed by SIGKILL$"),
            ("status", 2, 1, r"rank 1 of 2 \(pid \d+\) ended with exit status 3$"),
            ("fork", 2, 1, r"rank 1 of 2 \(pid \d+\) was killed by SIGKILL$"),
        ],
    )
    def test_process_that_dies_is_its_ranks_failure(self, ranks, how, world_size, per_process, said):
        with pytest.raises(RankFailedError, match=said) as caught:
            processes(ranks.dies, world_size, how, world_size - 1, threads_per_process=per_process)

        assert caught.value.rank == (2 if per_process == 2 else 1)
        assert caught.value.__cause__ is None

    def test_rank_that_was_only_told_is_not_the_one_named(self, ranks):
        with pytest.raises(RankFailedError, match=r"^rank 1 of 2 \(pid \d+\) was killed by SIGKILL$"):
            processes(ranks.told, 2)

    def test_busy_rank_is_ended_with_its_process_and_named(self, ranks):
        said = r"rank 1 of 3 failed with ValueError: first; rank 0, rank 2 did not .* were ended \(pid \d+, \d+\)"
        with pytest.raises(RankFailedError, match=said):
            processes(ranks.busy, 3, "raises")

    @pytest.mark.parametrize("how", ["raises", "is killed"])
    def test_stores_of_the_others_hear_it_first(self, ranks, how):
        """Not from spawn, which could only say that the run is over."""
        pytest.importorskip("dtorch_file_store")
        queue = multiprocessing.get_context("spawn").Queue()
        with pytest.raises(RankFailedError, match="^rank 1 of 3 "):
            processes(ranks.survives, 3, queue, how, threads_per_process=2 if how == "raises" else 1)

        said = dict(queue.get(timeout=LIMIT) for _ in range(2))
        queue.close()
        queue.join_thread()
        assert said.keys() == {0, 2}
        for text in said.values():
            assert re.search(r"rank 1 \(pid \d+\) was lost", text)
            assert how != "raises" or "rank 1 failed: ValueError: first" in text

    def test_failure_of_a_peer_ends_a_run_of_processes_inside_a_rank(self, ranks):
        def rank(ctx):
            if ctx.rank == 1:
                processes(ranks.waits, 2)

            time.sleep(0.3)
            raise ValueError("outer")

        began = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 0 of 2 failed with ValueError: outer"):
            run_ranks(rank, 2, LIMIT)

        assert time.monotonic() - began < PROMPT


class TestTimeout:
    @pytest.mark.parametrize(("how", "late"), [("sleeps", "rank 0, rank 2"), ("stopped", "rank 1")])
    def test_timeout_ends_the_run_and_names_who_is_late(self, ranks, monkeypatch, how, late):
        def begin_late(run, timeout):
            """The time counts from when the others have returned: how long processes start is the machine's matter."""
            run._pump(lambda: len(run.unfinished()) == len(late.split(", ")), LIMIT)
            waited.append(time.monotonic())
            wait(run, timeout)

        wait, waited = ProcessRun.wait, []
        monkeypatch.setattr(ProcessRun, "wait", begin_late)
        said = f"^spawn: {late} of 3 had not returned after 0.2 s; {late} did not return within 1 s, so "
        with pytest.raises(StoreTimeoutError, match=said):
            processes(ranks.busy, 3, how, timeout=0.2)

        assert time.monotonic() - waited[0] < PROMPT

    def test_timeout_before_the_ranks_began(self, ranks):
        with pytest.raises(StoreTimeoutError, match="^spawn: rank 0, rank 1 of 2 had not returned after 0.1 s$"):
            processes(ranks.who, 2, timeout=0.1)
