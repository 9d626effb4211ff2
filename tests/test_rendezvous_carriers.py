"""Ranks meet alike over every kind of c10d Store, whoever's it is."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dtorch_core import AbortedError, PeerLostError, RankFailedError, StoreTimeoutError, open_store, spawn

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import opening_ranks
    from opening_ranks import LONG, PROMPT, SHORT, Ranks, free_port, opened, raised

fake = opening_ranks.fake


class TestCarriers:
    """The same over every kind of c10d Store, given as one object to all threads or as a URL."""

    CARRIERS = ["HashStore", "FileStore", "TCPStore", "PrefixStore", "file://", "tcp://", "env://"]

    @pytest.fixture(params=CARRIERS)
    def carrier(self, request, site, tmp_path):
        if request.param in ("TCPStore", "PrefixStore"):
            server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            return server if request.param == "TCPStore" else dist.PrefixStore("mine/", server)

        if request.param == "env://":
            site.env("MASTER_ADDR", "127.0.0.1")
            site.env("MASTER_PORT", str(free_port()))
            return "env://"

        makers = {
            "HashStore": dist.HashStore,
            "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), -1),
            "file://": lambda: f"file://{tmp_path}/url",
            "tcp://": lambda: f"tcp://127.0.0.1:{free_port()}",
        }
        return makers[request.param]()

    def test_ranks_meet_again_and_again(self, fake, carrier):
        for _ in range(3):
            stores = opened(3, rendezvous=carrier).join()
            assert [store.rank for store in stores] == [0, 1, 2]

    def test_names_at_once_in_opposite_order(self, fake, carrier):
        """A rank that waits for one name does not hold up its other names on the same connection."""

        def call(rank, name):
            return lambda: open_store(name, rank=rank, world_size=2, timeout=LONG, rendezvous=carrier).close()

        def both(rank, names):
            return lambda: [call(rank, name)() for name in names]

        assert Ranks([call(0, "a"), call(0, "b"), both(1, "ba")]).join() == [None, None, [None, None]]

    def test_missing_rank(self, fake, carrier):
        opened(2, rendezvous=carrier).join()  # whatever has to be connected, or looked up, is
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=carrier)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "rank 0 gave up after 0.3 s: rank 1 had not come" in text
        assert ranks.seconds < SHORT + PROMPT

    def test_failing_rank_wakes_its_peers(self, fake, carrier):
        fake.behave[1] = lambda ctx: 1 / 0
        ranks = opened(3, rendezvous=carrier)
        outcomes = ranks.join()
        raised(outcomes[1:2], ZeroDivisionError)
        for text in raised([outcomes[0], outcomes[2]], AbortedError):
            assert "rank 1 failed: ZeroDivisionError" in text

    def test_spawned_rank_that_fails_wakes_an_opening(self, fake, carrier):
        def run(ctx):
            if ctx.rank == 0:
                open_store("x", rank=0, world_size=2, timeout=LONG, rendezvous=carrier)
            else:
                time.sleep(SHORT)
                raise ValueError("before it opened")

        started = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 1 of 2 failed with ValueError: before it opened") as caught:
            spawn(run, 2)

        assert "left behind" not in str(caught.value)
        assert time.monotonic() - started < 2 * PROMPT


class TestStoreOfSomebodyElse:
    @pytest.mark.parametrize(
        ("own", "timeout", "kind"), [(4.0, 1.0, StoreTimeoutError), (SHORT, PROMPT, PeerLostError)]
    )
    def test_whose_server_is_gone(self, own, timeout, kind):
        """c10d tries again for the time of the store's own, after pauses of a second or more."""
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        given = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=own), wait_for_workers=False)
        del server
        started = time.monotonic()
        with pytest.raises(kind, match="the server of the given TCPStore"):
            open_store("x", rank=0, world_size=2, rendezvous=given, timeout=timeout)

        assert time.monotonic() - started < PROMPT

    def test_written_in_python_without_clone(self, fake):
        class Plain(dist.Store):
            def __init__(self):
                super().__init__()
                self.inner = dist.HashStore()

            def set(self, key, value):
                self.inner.set(key, value)

            def get(self, key):
                return self.inner.get(key)

            def add(self, key, amount):
                return self.inner.add(key, amount)

            def check(self, keys):
                return self.inner.check(keys)

            def compare_set(self, key, expected, desired):
                return self.inner.compare_set(key, expected, desired)

            def wait(self, keys, timeout=None):
                self.inner.wait(keys, timeout)

            def delete_key(self, key):
                return self.inner.delete_key(key)

        plain = Plain()
        for _ in range(2):
            assert [store.rank for store in opened(2, rendezvous=plain).join()] == [0, 1]
