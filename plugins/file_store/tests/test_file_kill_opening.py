"""Processes that are killed at every step of an opening: what the others see, and what is left of them."""

import os
import socket
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_kill_ranks")
    import file_kill_ranks as processes
    from file_kill_ranks import LATENCIES, LATEST, LIMIT

pool, ranks = processes.pool, processes.ranks  # fixtures

pytest.importorskip("dtorch_samedevice_group")

CORE, FILES = "dtorch_core._meeting.opening:", "dtorch_file_store.opening:"

OPENING = {
    # when: where it is killed, what the place is called with then, and its rank where not every rank comes there.
    "before it chooses": (CORE + "_agree", None, None),
    "before it says what it chooses": (CORE + "Meeting.exchange", "choice", None),
    "having said half of what it chooses": (CORE + "Meeting._arrive", "choice", None),
    "before it imports the backend": (CORE + "load_factory", None, None),
    "before it listens": (FILES + "SessionDirectory", None, None),
    "before it says that it listens": (CORE + "Meeting.exchange", "built", None),
    "having said half that it listens": (CORE + "Meeting._arrive", "built", None),
    "before it connects": (FILES + "Node", None, None),
    "connecting": (FILES + "_Meeting._connect", None, 2),
    "before it says who it is": (FILES + "frame", "hello", None),
    "before it accepts": (FILES + "_Meeting._accept", None, None),
    "hearing who connects": (FILES + "_Meeting._greets", None, 0),
    "before it reads": (FILES + "Node.connect", None, None),
    "before it says that it is ready": (CORE + "Meeting.exchange", "ready", None),
    "having said half that it is ready": (CORE + "Meeting._arrive", "ready", None),
}


class TestKillWhileOpening:
    def survive(self, ranks, where, first, victim, kind="store", rendezvous=None, timeout=LIMIT):
        """The answers of those that open it with one that is killed on the way, and the seconds from then on."""
        processes = ranks.idle(3)
        for rank, process in enumerate(processes):
            command = ("dies_opening", where, first) if rank == victim else ("open",)
            process.tell(*command, rank, 3, rendezvous or ranks.rendezvous, kind, "kill", timeout)

        at = processes[victim].answer()["at"]
        answers = [process.answer() for rank, process in enumerate(processes) if rank != victim]
        return answers, [answer["at"] - at for answer in answers]

    def nothing_is_left(self, ranks, victim, kind="store"):
        """And the name is free."""
        assert os.listdir(ranks.sessions) == []
        for rank, process in enumerate(ranks.idle(3)):
            if rank != victim:
                process.do("forget")
                held = process.do("held")
                assert not held.get("mapped") and not held.get("/memfd") and not held.get("pidfd"), held
                assert not held.get("socket", 1) > 1 and held["threads"] == 1, held

        ranks.replace(victim)
        for process in ranks.opened(3, kind):
            process.do("close")

    @pytest.mark.parametrize(
        ("step", "victim"),
        [(step, victim) for step, (*_, only) in OPENING.items() for victim in ([0, 2] if only is None else [only])],
    )
    def test_survivors_learn_it_at_once(self, ranks, step, victim):
        where, first, _ = OPENING[step]
        dead = ranks.idle(3)[victim]
        answers, took = self.survive(ranks, where, first, victim)
        for answer in answers:
            assert answer.get("error") == "PeerLostError", answer
            assert f"rank {victim} (pid {dead.pid})" in answer["text"], answer["text"]

        assert max(took) < LATEST
        LATENCIES.extend(took)
        self.nothing_is_left(ranks, victim)

    @pytest.mark.parametrize("step", ["before it imports the backend", "before it listens", "before it reads"])
    def test_opening_a_group(self, ranks, step):
        """The store is part of a larger opening."""
        dead = ranks.idle(3)[1]
        answers, took = self.survive(ranks, *OPENING[step][:2], 1, "group")
        for answer in answers:
            assert answer.get("error") == "PeerLostError", answer
            assert f"rank 1 (pid {dead.pid})" in answer["text"], answer["text"]

        assert max(took) < LATEST
        self.nothing_is_left(ranks, 1, "group")

    @pytest.mark.parametrize("step", ["members", "choice", "ready"])
    def test_splitting_a_group(self, ranks, step):
        """Its ranks know each other: nobody has to be told first who they are."""
        processes = ranks.opened(3, "group")
        for rank, process in enumerate(processes):
            dies = "dies_splitting", "dtorch_core._meeting.meeting:Meeting.exchange", step
            command = dies if rank == 2 else ("split",)
            process.tell(*command, [2, 0, 1])

        at = processes[2].answer()["at"]
        for process in processes[:2]:
            answer = process.answer()
            assert answer.get("error") == "PeerLostError", answer
            assert f"(pid {processes[2].pid})" in answer["text"], answer["text"]
            assert answer["at"] - at < LATEST
            process.do("close")

        self.nothing_is_left(ranks, 2, "group")

    @pytest.mark.parametrize("kind", ["store", "group"])
    def test_rank_that_serves_the_rendezvous(self, ranks, kind):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

        dead = ranks.idle(3)[0]
        answers, took = self.survive(ranks, CORE + "load_factory", None, 0, kind, rendezvous)
        for answer in answers:
            assert answer.get("error") == "PeerLostError", answer
            assert f"rank 0 (pid {dead.pid})" in answer["text"], answer["text"]

        assert max(took) < LATEST
        self.nothing_is_left(ranks, 0, kind)

    @pytest.mark.parametrize("where", [CORE + "Meeting.exchange", CORE + "_meet"])
    def test_rank_of_which_nobody_knows_costs_the_timeout_and_is_named(self, ranks, where):
        answers, took = self.survive(ranks, where, None, 1, timeout=0.4)
        for answer in answers:
            assert answer.get("error") == "StoreTimeoutError", answer
            assert "rank 1 had not come" in answer["text"]

        assert max(took) < 0.4 + LATEST
        self.nothing_is_left(ranks, 1)
