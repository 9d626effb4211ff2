"""A store that a factory opens over the same ranks, and how it ends with the opening that it is for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from dtorch_core import AbortedError, NoBackendError, open_group, open_store, refresh

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import opening_ranks
    from opening_ranks import LONG, PROMPT, SHORT, Ranks, opened, raised

fake = opening_ranks.fake


class TestNested:
    """A factory opens a store over the same ranks; it is given up with the opening that it is for."""

    def test_opens(self, fake):
        inner = {}

        def nest(ctx):
            inner[ctx.rank] = ctx.open_store("data")

        fake.behave.update({rank: nest for rank in range(3)})
        for _ in range(2):
            opened(3).join()
            assert [inner[rank].name for rank in range(3)] == ["x/data"] * 3
            assert [inner[rank].rank for rank in range(3)] == [0, 1, 2]

    @pytest.mark.parametrize("first", ["the peers wait", "it fails"])
    def test_peers_inside_are_woken(self, fake, first):
        waiting, failed = threading.Event(), threading.Event()

        def nest(ctx):
            if first == "it fails":
                assert failed.wait(10)

            waiting.set()
            ctx.open_store("data")

        def fail(ctx):
            if first == "the peers wait":
                assert waiting.wait(10)
                time.sleep(SHORT)

            raise OSError("no room")

        def run_rank(rank):
            try:
                return open_store("x", rank=rank, world_size=3, timeout=LONG)
            finally:
                if rank == 1:
                    failed.set()

        fake.behave.update({0: nest, 1: fail, 2: nest})
        ranks = Ranks([lambda r=r: run_rank(r) for r in range(3)])
        outcomes = ranks.join()
        raised(outcomes[1:2], OSError)
        for text in raised([outcomes[0], outcomes[2]], AbortedError):
            assert "open_store('x/data') inside open_store('x')" in text
            assert "rank 1 failed: OSError: no room" in text

        assert ranks.seconds < PROMPT

    def test_refusal_says_who_asked_for_the_store(self, site):
        source = """
        from dtorch_core import BackendSpec, Support, hookimpl

        def make(ctx):
            ctx.open_store("data")

        @hookimpl
        def dtorch_register_thread_groups():
            return [BackendSpec("needy", f"{__name__}:make", lambda topology: Support.yes(1, "fits"))]
        """
        site.add("needy-dist", source, plugin="needy")
        site.backend("far-dist", "far", "Support.no('too far')", plugin="far")
        site.env("DTORCH_LOAD_PLUGINS", "needy,far")
        refresh()
        calls = [lambda r=r: open_group("g", rank=r, world_size=2, timeout=LONG) for r in range(2)]
        for text in raised(Ranks(calls).join(), NoBackendError):
            assert text.startswith("the group 'g' (needy) asked for a store over its ranks: store for 2 ranks")
            assert "too far" in text

    def test_after_the_opening_it_stands_alone(self, fake):
        contexts = {}
        fake.behave.update({rank: lambda ctx: contexts.setdefault(ctx.rank, ctx) for rank in range(2)})
        opened(2).join()
        for _ in range(2):
            stores = Ranks([lambda r=r: contexts[r].open_store("later") for r in range(2)]).join()
            assert [store.name for store in stores] == ["x/later"] * 2
