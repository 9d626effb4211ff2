"""``dtorch bench``: the processes that it measures with, and how their ends are told."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import Pipe
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dtorch_core.bench import collectives, exchange
from dtorch_core.bench.collectives import Plan
from dtorch_core.bench.crew import Crew, RefusedError, answer
from dtorch_core.bench.groups import DTORCH
from dtorch_core.bench.peers import GLOO
from dtorch_core.bench.sizes import KIB
from dtorch_core.errors import PeerLostError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from bench_runs import inner


class TestCrew:
    def test_error_of_a_rank_is_its_answer(self):
        ours, theirs = Pipe()
        for question in (("prepare", "x", -1), ("prepare", "x", 5), ("time", "x", 3), ("time", "y", 3), ("end",)):
            ours.send(question)

        def prepare(number):
            base = inner(number)
            return lambda count: float(base + count)

        answer(theirs, prepare)
        answers = [ours.recv() for _ in range(4)]
        assert answers[0].startswith("ValueError: below zero")
        assert answers[1:3] == [0.0, 13.0]
        assert answers[3].startswith("KeyError: 'y'")

    def test_refusal_names_the_rank_and_leaves_no_answer_behind(self):
        pipes = [Pipe() for _ in range(2)]
        crew = Crew.__new__(Crew)
        crew._pipes = [ours for ours, _ in pipes]
        for said in ("ValueError: no", 1.5), (2.5, 3.5):
            for (_, theirs), each in zip(pipes, said, strict=True):
                theirs.send(each)

        with pytest.raises(RefusedError, match="^rank 0: ValueError: no$"):
            crew.ask("time", "x", 3)

        assert crew.ask("time", "x", 3) == [2.5, 3.5]

    def test_process_that_ends_is_named_and_closed(self):
        class Folder:
            def cleanup(self):
                self.clean = True

        def die(end):
            end.recv()
            os.kill(os.getpid(), signal.SIGKILL)

        context = multiprocessing.get_context("fork")
        crew = Crew.__new__(Crew)
        ours, theirs = context.Pipe()
        process = context.Process(target=die, args=(theirs,))
        process.start()
        theirs.close()
        crew._pipes, crew._processes, crew._folder = [ours], [process], Folder()
        with pytest.raises(PeerLostError, match=rf"^rank 0 \(pid {process.pid}\) ended .* exit code -9$"):
            crew.ask("time", "x", 3)

        crew.close()
        assert crew._folder.clean

    def test_queue_whose_process_ends_raises(self):
        import torch

        queues = exchange.Queues()
        queues.call(torch.arange(4.0))
        queues._process.kill()
        with pytest.raises(PeerLostError, match=rf"pid {queues._process.pid}\) ended"):
            queues.call(torch.arange(4.0))

        queues.close()

    def test_peer_that_refuses_is_skipped_with_a_line(self, monkeypatch):
        pytest.importorskip("dtorch_samedevice_group")

        class Refusing:
            def ask(self, *question):
                raise RefusedError("rank 0: RuntimeError: not on this device")

            def close(self):
                return

        monkeypatch.setattr(collectives, "gloo_crew", lambda ranks: Refusing())
        plan = Plan(ranks_as=("threads",), rounds=1, operations=("broadcast",), sizes=(KIB,))
        (series,) = collectives.measure(plan, lambda text: None).values()
        assert GLOO not in series and DTORCH in series
        assert plan.skipped == ["Gloo, broadcast, 1 KiB, 2 ranks: rank 0: RuntimeError: not on this device"]
