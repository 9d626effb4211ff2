"""The flight recorder: off by default, and when it is on, errors say what every rank did last."""

import gc
import threading

import pytest
import torch

from dtorch_core import CollectiveMismatchError, PeerLostError, RankFailedError, StoreTimeoutError, recorder
from dtorch_core.cli import main
from dtorch_core.testing import run_ranks

LIMIT = 15.0


@pytest.fixture
def on(monkeypatch):
    monkeypatch.setenv(recorder.VARIABLE, "3")


def on_ranks(body, world_size=2, timeout=LIMIT):
    def rank(ctx):
        with ctx.open_group("flight", timeout=timeout) as group:
            return body(group)

    return run_ranks(rank, world_size, 2 * LIMIT)


def calls(group):
    return [(entry.number, entry.call, entry.state) for entry in group._recorder.entries()]


class TestRecorder:
    def test_off_without_the_variable(self, monkeypatch):
        for value in (None, "", "0", " "):
            monkeypatch.delenv(recorder.VARIABLE, raising=False)
            if value is not None:
                monkeypatch.setenv(recorder.VARIABLE, value)

            def body(group):
                assert group._recorder is None
                with pytest.raises(CollectiveMismatchError) as caught:
                    group.all_reduce(torch.ones(2 + group.rank))

                assert "last calls" not in str(caught.value)

            on_ranks(body)

    def test_keeps_the_last_calls_and_how_they_ended(self, on):
        def body(group):
            group.barrier()
            group.all_reduce(torch.ones(2, 3))
            group.all_gather(torch.arange(3), dim=-1)
            group.send(torch.ones(1), group.rank)
            assert calls(group) == [
                (2, "all_reduce(float32[2, 3], sum)", "done"),
                (3, "all_gather(int64[3], dim=-1)", "done"),
                (4, f"send(float32[1], dst={group.rank}, tag=0)", "done"),
            ]
            group.recv(group.rank)
            work = group.broadcast(torch.ones(1), 1, async_op=True)
            assert calls(group)[-1] == (6, "broadcast(float32[1], src=1)", "begun")
            work.wait()
            assert calls(group)[-1][-1] == "done"
            with pytest.raises(ValueError):
                group.gather(torch.ones(1), dst=5)

            assert len(calls(group)) == 3

        on_ranks(body)

    def test_variable_that_is_no_number_is_an_error(self, monkeypatch):
        monkeypatch.setenv(recorder.VARIABLE, "many")
        with pytest.raises(RankFailedError, match="DTORCH_FLIGHT_RECORDER must be the number of calls"):
            on_ranks(lambda group: None)


class TestErrors:
    def test_mismatch_shows_what_every_rank_did_last(self, on):
        def body(group):
            group.barrier()
            for _ in range(2):
                with pytest.raises(CollectiveMismatchError) as caught:
                    group.all_reduce(torch.ones(2), "max" if group.rank == 1 else "sum")

                text = str(caught.value)
                assert text.count("last calls of group 'flight'") == 1
                assert "rank 1: all_reduce(float32[2], max)" in text
                for rank in range(3):
                    assert f"\n  rank {rank} of 3:\n" in text

                assert "barrier: done" in text
                group.barrier()

        on_ranks(body, 3)

    def test_timeout_shows_where_the_late_rank_is(self, on):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                group.send(torch.ones(4), 1, tag=7)
                assert over.wait(LIMIT)
                return

            group.recv(1, timeout=0.05, async_op=True)
            with pytest.raises(StoreTimeoutError) as caught:
                group.all_gather(torch.ones(2), timeout=0.1)

            over.set()
            assert "rank 1 had not come" in str(caught.value)
            assert "recv(src=1, tag=0): begun" in str(caught.value)
            assert "all_gather(float32[2], dim=0): StoreTimeoutError" in str(caught.value)

        on_ranks(body)

    def test_lost_peer_and_works(self, on):
        begun = threading.Event()

        def body(group):
            if group.rank == 1:
                assert begun.wait(LIMIT)
                return

            work = group.all_reduce(torch.ones(2), async_op=True)
            begun.set()
            for _ in range(2):
                with pytest.raises(PeerLostError) as caught:
                    work.wait()

                assert str(caught.value).count("last calls") == 1

            assert "last calls" in str(work.exception())

        on_ranks(body)


class TestListing:
    def test_recorders_of_the_process_are_listed_while_their_groups_live(self, on):
        gc.collect()  # groups of other tests, which only reference cycles keep

        def body(group):
            group.barrier()
            group.barrier()
            found = [each for each in recorder.recorders() if each.group == "flight"]
            assert [(each.rank, each.world_size) for each in found] == [(0, 2), (1, 2)]
            assert all(each.entries()[-1].call == "barrier" for each in found)
            group.barrier()

        on_ranks(body)
        gc.collect()
        assert [each for each in recorder.recorders() if each.group == "flight"] == []

    def test_doctor_prints_them(self, on, capsys):
        def body(group):
            group.all_reduce(torch.ones(5))
            group.barrier()
            if group.rank == 0:
                main(["doctor"])

            group.barrier()

        on_ranks(body)
        text = capsys.readouterr().out
        assert "DTORCH_FLIGHT_RECORDER=3  how many calls" in text
        assert "group 'flight', rank 0 of 2:" in text
        assert "#1 all_reduce(float32[5], sum): done, begun" in text

    def test_doctor_says_how_to_switch_it_on(self, monkeypatch, capsys):
        monkeypatch.delenv(recorder.VARIABLE, raising=False)
        gc.collect()
        main(["doctor"])
        assert "off; set DTORCH_FLIGHT_RECORDER=N" in capsys.readouterr().out
