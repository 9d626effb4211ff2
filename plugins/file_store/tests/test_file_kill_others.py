"""Processes that are stopped, forked or fail otherwise: what the others see, and what is left of them."""

import os
import signal
import time
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_kill_ranks")
    import file_kill_ranks as processes
    from file_kill_ranks import CONSUMER, LATEST, OTHER, PRODUCER, Row

pool, ranks = processes.pool, processes.ranks  # fixtures

pytest.importorskip("dtorch_samedevice_group")


class TestEndsOtherwise:
    def test_script_that_raises(self, ranks):
        first, second = ranks.opened(2)
        first.waits("get", "k")
        second.tell("fail")
        answer = first.answer()
        assert answer["error"] == "PeerLostError"
        assert f"rank 1 (pid {second.pid})" in answer["text"]
        first.do("close")
        second.ended()
        ranks.replace(1)

    def test_thread_that_raises(self, ranks):
        first, second = ranks.idle(2)
        first.tell("open", 0, 2, ranks.rendezvous)
        second.tell("fail_in_thread", 1, 2, ranks.rendezvous)
        first.value()
        answer = first.fails("get", "k")
        assert answer["error"] == "PeerLostError"
        assert f"rank 1 (pid {second.pid}) was lost" in answer["text"]
        assert "KeyError" in answer["text"]
        second.value()
        second.do("close")
        first.do("close")

    def test_goodbye_is_no_death(self, ranks):
        first, second, third = ranks.opened(3)
        first.do("set", "k", 1)
        second.do("close")
        third.do("get", "k")
        third.do("finish", "k")
        first.do("wait", "k")
        first.do("close")
        third.do("close")


class TestStopped:
    def test_costs_the_timeout_and_no_more(self, ranks):
        first, second, third = ranks.opened(3)
        first.do("set", "k", 1)
        second.signal(signal.SIGSTOP)
        for call in (("wait", "k"), ("get", "other"), ("barrier",), ("reset",)):
            begun = time.monotonic()
            answer = first.fails(*call, 0.3)
            assert answer["error"] == "StoreTimeoutError"
            assert 0.3 <= answer["at"] - begun < 0.3 + LATEST

        third.do("set", "other", 1)  # the others go on
        first.do("get", "other")
        first.do("finish", "other")
        third.do("wait", "other")
        second.signal(signal.SIGCONT)
        second.do("get", "k")
        second.do("finish", "k")
        first.do("wait", "k")
        for process in (first, second, third):
            process.tell("barrier")

        for process in (first, second, third):
            process.value()

        for process in (first, second, third):
            process.do("close")

    def test_peer_that_does_not_read_blocks_nobody(self, ranks):
        """More than the sockets hold is under way; it all arrives once the peer reads."""
        count, numel = 1000, 2000
        first, second = ranks.opened(2)
        second.signal(signal.SIGSTOP)
        assert first.do("set_many", count, numel) < LATEST
        first.tell("wait_many", count)
        second.signal(signal.SIGCONT)
        second.do("get_many", count, numel)
        first.value()
        first.do("close")
        second.do("close")

    def test_goodbye_waits_a_second_for_a_peer_that_does_not_read(self, ranks):
        first, second = ranks.opened(2)
        second.signal(signal.SIGSTOP)
        first.do("set_many", 1000, 2000)
        assert 0.5 < first.do("close") < 2.0
        second.signal(signal.SIGCONT)
        assert second.fails("get", "k")["error"] == "PeerLostError"
        second.do("close")

    def test_goodbye_to_a_peer_that_is_stopped_is_said_at_once(self, ranks):
        first, second = ranks.opened(2)
        second.signal(signal.SIGSTOP)
        assert first.do("close") < 0.5
        second.signal(signal.SIGCONT)
        answer = second.fails("get", "k")
        assert answer["error"] == "PeerLostError"
        assert "rank 0" in answer["text"]
        second.do("close")

    def test_death_is_seen_beside_a_stopped_rank(self, ranks):
        row = Row(ranks, 3, CONSUMER)
        stopped = row.survivors.pop(OTHER)
        row.survivors[PRODUCER].waits("get", "k")
        stopped.signal(signal.SIGSTOP)
        row.kill()
        stopped.signal(signal.SIGCONT)
        row.lost(stopped.fails("get", "k"), OTHER)
        row.survivors[OTHER] = stopped
        row.end()

    def test_stopped_rank_that_is_killed(self, ranks):
        row = Row(ranks, 2, CONSUMER)
        row.survivors[PRODUCER].waits("get", "k")
        row.dead.signal(signal.SIGSTOP)
        row.kill()
        row.end()


class TestFork:
    def test_child_is_refused_and_the_parent_goes_on(self, ranks):
        first, second = ranks.opened(2)
        first.do("set", "k", 1)
        child, answers = first.do("fork")
        try:
            refused = {name: said for name, said in answers.items() if name not in ("close",)}
            for name, said in refused.items():
                assert said.startswith("ProtocolError"), (name, said)
                assert f"opened in pid {first.pid}" in said and f"this is pid {child}" in said

            assert answers["close"] == "done"
            second.do("get", "k")
            second.do("finish", "k")
            first.do("wait", "k")
            first.tell("barrier")
            second.do("barrier")
            first.value()
            first.do("close")
            second.do("close")
        finally:
            os.kill(child, signal.SIGKILL)

    def test_death_is_seen_though_a_forked_child_lives(self, ranks):
        row = Row(ranks, 2, CONSUMER)
        child, _ = row.dead.do("fork")
        try:
            row.survivors[PRODUCER].waits("get", "k")
            row.kill()
            row.end()
        finally:
            os.kill(child, signal.SIGKILL)


class TestDirectory:
    def test_dead_session_does_not_disturb(self, ranks):
        """All of its processes were killed; the next one of the same name works, and the dead one is gone."""
        first, second = ranks.opened(2)
        for process in (first, second):
            process.signal(signal.SIGKILL)

        ranks.replace(0)
        ranks.replace(1)
        (dead,) = os.listdir(ranks.sessions)
        for process in ranks.opened(2):
            process.tell("barrier")

        for process in ranks.idle(2):
            process.value()

        (alive,) = os.listdir(ranks.sessions)
        assert alive != dead

        for process in ranks.idle(2):
            process.do("close")

        assert os.listdir(ranks.sessions) == []

    def test_descriptors_and_mappings_after_many_sessions(self, ranks):
        for process in ranks.opened(2):
            process.do("close")

        before = [process.do("held") for process in ranks.idle(2)]
        for _ in range(5):
            first, second = ranks.opened(2)
            first.do("set", "k", 1)
            second.do("get", "k")
            second.do("finish", "k")
            first.do("wait", "k")
            first.do("close")
            second.do("close")

        for process, held in zip(ranks.idle(2), before, strict=True):
            process.do("forget")
            assert process.do("held") == held
