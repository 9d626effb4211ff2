"""``dtorch bench``: Ctrl-C leaves no rank in a call that the others are not in."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dtorch_core.bench.crew import Crew
from dtorch_core.bench.interrupts import after_this
from dtorch_core.bench.team import Team

HERE = str(Path(__file__).parent)

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(HERE)
    import bench_runs


class TestInterrupts:
    def test_first_waits_for_the_end_and_the_second_does_not(self):
        before, steps = signal.getsignal(signal.SIGINT), []
        with pytest.raises(KeyboardInterrupt), after_this():
            signal.raise_signal(signal.SIGINT)
            steps.append("one")

        with pytest.raises(KeyboardInterrupt), after_this():
            signal.raise_signal(signal.SIGINT)
            steps.append("two")
            signal.raise_signal(signal.SIGINT)
            steps.append("three")

        assert steps == ["one", "two"] and signal.getsignal(signal.SIGINT) is before

    def test_processes_answer_and_do_not_hear_it(self, monkeypatch, capfd):
        monkeypatch.syspath_prepend(HERE)  # where the processes find it
        with closing(Crew(2, bench_runs.interrupted)) as crew:
            crew.ask("prepare", "x")
            with pytest.raises(KeyboardInterrupt):
                crew.ask("time", "x", bench_runs.INTERRUPT)

            assert crew.ask("time", "x", 3) == [3.0, 3.0]

        assert capfd.readouterr().err == ""

    def test_threads_end_their_job(self):
        ended = []

        def job(rank):
            if rank == 0:
                os.kill(os.getpid(), signal.SIGINT)

            ended.append(rank)

        with closing(Team(2)) as team:
            with pytest.raises(KeyboardInterrupt):
                team.run(job)

            assert sorted(ended) == [0, 1]
            assert team.run(lambda rank: rank) == [0, 1]
