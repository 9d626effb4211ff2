"""Ranks open a name together: threads of one process meet, whatever comes late, twice or never."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dtorch_core import ProtocolError, RankFailedError, StoreTimeoutError, open_store, spawn
from dtorch_core._meeting import rendezvous as rendezvous

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import opening_ranks
    from opening_ranks import LONG, PROMPT, SHORT, Ranks, opened, raised

fake = opening_ranks.fake


class TestInProcess:
    @pytest.mark.parametrize("count", [2, 3, 4])
    def test_threads_meet_by_name(self, fake, count):
        stores = opened(count).join()
        assert [store.rank for store in stores] == list(range(count))
        assert {store.backend for store in stores} == {"fake"}
        for store in stores:
            assert store.world_size == count
            assert [member.rank for member in store.topology] == list(range(count))
            assert store.topology == stores[0].topology
            assert store.topology.same_process and store.topology.same_device

        assert len({member.thread for member in stores[0].topology}) == count
        assert {member.pid for member in stores[0].topology} == {os.getpid()}

    def test_world_size_1_meets_nobody(self, fake):
        """The same name in several threads at once is a store of each one's own."""
        calls = [lambda: open_store("x", rank=0, world_size=1, timeout=LONG)] * 8
        assert [store.backend for store in Ranks(calls).join()] == ["fake"] * 8

    def test_names_at_once_are_apart(self, fake):
        ranks = [opened(2, name) for name in ("a", "b", "a/b", "b/a")]
        for names in ranks:
            one, two = names.join()
            assert one.name == two.name

    def test_names_are_any_text(self, fake):
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        names = ["a/b", "..", " ", "\0", "\n", "\ud800", "\u00e4" * 5000, "x" * 100_000, "x" * 100_001]
        held = [opened(2, name, rendezvous=server).join() for name in names]
        assert [[store.name for store in stores] for stores in held] == [[name, name] for name in names]
        held[-1][0].context.rendezvous.set("address", "of the last")
        assert not held[-2][1].context.rendezvous.check(["address"])

    def test_name_is_opened_many_times(self, fake):
        def call(rank):
            def run():
                for _ in range(50):
                    open_store("again", rank=rank, world_size=3, timeout=LONG).close()

            return run

        keys = rendezvous._in_process.num_keys()
        assert Ranks([call(rank) for rank in range(3)]).join() == [None] * 3
        # What stays of a name is how often it was opened.
        assert rendezvous._in_process.num_keys() <= keys + 1

    def test_name_is_opened_again_while_it_is_open(self, fake):
        first, second = opened(2).join(), opened(2).join()
        first[0].context.rendezvous.set("address", "of the first")
        assert first[1].context.rendezvous.get("address") == b"of the first"
        assert not second[1].context.rendezvous.check(["address"])

    def test_missing_rank_costs_the_timeout_and_is_named(self, fake):
        ranks = Ranks([lambda r=r: open_store("x", rank=r, world_size=4, timeout=SHORT) for r in (0, 2)])
        for text in raised(ranks.join(), StoreTimeoutError):
            assert "gave up after 0.3 s: rank 1, rank 3 had not come" in text
            assert "open_store('x')" in text

        assert SHORT <= ranks.seconds < SHORT + PROMPT

    def test_shortest_timeout_ends_it_for_all(self, fake):
        timeouts = {0: LONG, 1: SHORT, 2: LONG}
        ranks = Ranks([lambda r=r: open_store("x", rank=r, world_size=4, timeout=timeouts[r]) for r in timeouts])
        for text in raised(ranks.join(), StoreTimeoutError):
            assert "rank 1 gave up after 0.3 s: rank 3 had not come" in text

        assert ranks.seconds < PROMPT

    def test_late_rank_meets_those_who_try_again(self, fake):
        def persistent():
            for attempt in range(100):
                try:
                    return attempt, open_store("x", rank=0, world_size=2, timeout=0.1)
                except StoreTimeoutError:
                    late.set()

            raise AssertionError("rank 1 never came")

        late = threading.Event()
        ranks = Ranks([persistent, lambda: late.wait(10) and open_store("x", rank=1, world_size=2, timeout=LONG)])
        (attempt, first), second = ranks.join()
        assert attempt >= 1
        assert first.topology == second.topology

    def test_late_rank_alone_costs_its_own_timeout(self, fake):
        for rank in (0, 1):
            (outcome,) = Ranks([lambda r=rank: open_store("x", rank=r, world_size=2, timeout=SHORT)]).join()
            assert f"rank {1 - rank} had not come" in str(outcome)

    def test_two_callers_of_one_rank(self, fake):
        """The second one is told; the opening goes on without it."""
        first = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=LONG)])
        number = rendezvous._in_process.add("dtorch/store/x/openings", 0)
        rendezvous._in_process.wait([f"dtorch/store/x/{number}/here/0"], timedelta(seconds=LONG))
        (twice,) = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=LONG)]).join()
        assert "two callers say that they are rank 0" in raised([twice], ProtocolError)[0]
        (peer,) = Ranks([lambda: open_store("x", rank=1, world_size=2, timeout=LONG)]).join()
        assert first.join()[0].topology == peer.topology

    @pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
    def test_different_world_sizes(self, fake, order):
        """Rank 2 says 4. Whoever comes first, all three learn of it."""
        ranks = []
        for rank in order:
            size = 4 if rank == 2 else 3
            ranks.append(Ranks([lambda r=rank, n=size: open_store("x", rank=r, world_size=n, timeout=LONG)]))
            number = rendezvous._in_process.add("dtorch/store/x/openings", 0)
            if rank != order[-1]:
                key = f"dtorch/store/x/{number}/members/{rank}"
                rendezvous._in_process.wait([key], timedelta(seconds=LONG))

        for (text,) in [raised(one.join(), ProtocolError) for one in ranks]:
            assert "do not say the same world_size: rank 0 says 3, rank 1 says 3, rank 2 says 4" in text

        assert max(one.seconds for one in ranks) < PROMPT

    def test_rank_of_a_smaller_world(self, fake):
        ranks = opened(3, world_size=lambda rank: 2 if rank == 0 else 3, timeout=2 * SHORT)
        raised(ranks.join(), (ProtocolError, StoreTimeoutError))
        assert any(isinstance(outcome, ProtocolError) for outcome in ranks.outcomes)

    @pytest.mark.parametrize(
        ("wrong", "error", "said"),
        [
            ({"name": ""}, ValueError, "name must be a non-empty string"),
            ({"name": 3}, ValueError, "name must be a non-empty string"),
            ({"rank": 2}, ValueError, r"rank 2 is not one of 2 ranks \(0 to 1\)"),
            ({"rank": -1}, ValueError, "rank -1 is not one of 2 ranks"),
            ({"rank": True}, TypeError, "rank must be an int, not True"),
            ({"world_size": 0}, ValueError, "world_size must be at least 1, not 0"),
            ({"rank": 1, "world_size": 1}, ValueError, r"rank 1 is not one of 1 rank \(0 to 0\)"),
            ({"world_size": 2.0}, TypeError, "world_size must be an int"),
            ({"timeout": 0}, ValueError, "timeout must be a finite number of seconds, above 0, not 0"),
            ({"timeout": float("inf")}, ValueError, "timeout must be a finite number"),
            ({"timeout": float("nan")}, ValueError, "timeout must be a finite number"),
            ({"timeout": "5"}, ValueError, "timeout must be a finite number"),
            ({"rendezvous": 7}, TypeError, "rendezvous must be a torch.distributed.Store, a URL or None, not 7"),
        ],
    )
    def test_wrong_argument(self, fake, wrong, error, said):
        given = {"name": "x", "rank": 0, "world_size": 2, "timeout": SHORT, **wrong}
        with pytest.raises(error, match=said):
            open_store(given.pop("name"), **given)


class TestSpawn:
    def test_names_meet_in_each_run_alone(self, fake):
        def run(ctx):
            return ctx.open_store("x", timeout=LONG).topology

        def spawned():
            return spawn(run, 2, timeout=LONG)

        for topologies in Ranks([spawned] * 4).join():
            assert topologies[0] == topologies[1]

    @pytest.mark.parametrize("where", ["before it opens", "in its factory", "in its body"])
    def test_peer_that_fails_wakes_an_opening(self, fake, where):
        def fail(ctx=None):
            raise OSError("no room")

        if where == "in its factory":
            fake.behave[2] = fail
            fake.behave.update({rank: lambda ctx: ctx.open_store("data") for rank in (0, 1)})

        def run(ctx):
            if ctx.rank == 2 and where == "before it opens":
                fail()

            ctx.open_store("x", timeout=LONG)
            if ctx.rank == 2 and where == "in its body":
                fail()

            ctx.open_store("y", timeout=LONG)

        started = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            spawn(run, 3)

        assert "OSError: no room" in str(caught.value)
        assert "left behind" not in str(caught.value)
        assert caught.value.rank == 2
        assert time.monotonic() - started < PROMPT

    def test_peer_that_returns_without_opening_costs_the_timeout(self, fake):
        def run(ctx):
            if ctx.rank:
                ctx.open_store("x", timeout=SHORT)

        with pytest.raises(RankFailedError, match="rank 0 had not come"):
            spawn(run, 3, timeout=LONG)
