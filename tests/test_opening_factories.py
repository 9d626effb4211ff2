"""Ranks build their handles together: whatever a factory does on one of them ends alike for all."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from dtorch_core import AbortedError, PluginError, ProtocolError, StoreTimeoutError, refresh

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import opening_ranks
    from opening_ranks import LONG, PROMPT, SHORT, opened, raised

fake = opening_ranks.fake


class TestFactory:
    def test_gets_the_context(self, fake):
        seen = {}
        fake.behave.update({rank: lambda ctx: seen.setdefault(ctx.rank, ctx) for rank in range(2)})
        stores = opened(2, timeout=LONG).join()
        for rank, ctx in seen.items():
            assert (ctx.kind, ctx.name, ctx.rank, ctx.world_size, ctx.device) == ("store", "x", rank, 2, "cpu")
            assert (ctx.topology, ctx.timeout) == (stores[0].topology, LONG)
            assert ctx.selection.chosen == "fake"

    def test_rendezvous_is_shared_by_its_ranks_alone(self, fake):
        found = []

        def claim(ctx):
            found.append(ctx.rendezvous.compare_set("owner", "", f"rank {ctx.rank}").decode())

        fake.behave.update({rank: claim for rank in range(3)})
        opened(3).join()
        opened(3).join()
        assert [len(set(found[:3])), len(set(found[3:]))] == [1, 1]

    def test_factories_exchange_what_they_say(self, fake):
        found, tokens = {}, []

        def exchange(ctx):
            tokens.append(ctx.token)
            found[ctx.rank] = ctx.exchange({"rank": ctx.rank, "odd": [ctx.name, None]})
            with pytest.raises(ProtocolError, match=f"rank {ctx.rank}: exchange.*once"):
                ctx.exchange({})

        fake.behave.update({rank: exchange for rank in range(3)})
        stores = opened(3).join()
        assert found == {rank: [{"rank": other, "odd": ["x", None]} for other in range(3)] for rank in range(3)}
        assert len(set(tokens)) == 1 and tokens[0].isalnum()
        opened(3).join()
        assert len(set(tokens)) == 2
        with pytest.raises(ProtocolError):
            stores[0].context.exchange({})

    @pytest.mark.parametrize("comes", [True, False])
    def test_factory_that_fails_ends_the_exchange_of_the_others(self, fake, comes):
        def exchange(ctx):
            ctx.exchange({})

        def fail(ctx):
            if comes:
                ctx.exchange({})

            raise OSError("no room")

        fake.behave.update({0: exchange, 1: fail, 2: exchange})
        ranks = opened(3)
        outcomes = ranks.join()
        raised(outcomes[1:2], OSError)
        for text in raised([outcomes[0], outcomes[2]], AbortedError):
            assert "rank 1 failed: OSError: no room" in text

        assert ranks.seconds < PROMPT

    def test_rank_that_finds_another_one_gone_learns_why(self, fake):
        errors = {}

        def ask(ctx):
            errors[ctx.rank] = ctx.failure(LONG)
            raise errors[ctx.rank]

        fake.behave.update({0: ask, 1: lambda ctx: 1 / 0})
        raised(opened(2).join()[:1], AbortedError)
        assert "rank 1 failed: ZeroDivisionError" in str(errors[0])
        fake.behave.update({0: lambda ctx: errors.update({2: ctx.failure(0.01)}), 1: lambda ctx: None})
        assert [store.rank for store in opened(2).join()] == [0, 1]
        assert errors[2] is None

    @pytest.mark.parametrize("odd", [0, 1, 2])
    def test_raises_on_one_rank(self, fake, odd):
        def fail(ctx):
            raise OSError("no room")

        fake.behave[odd] = fail
        ranks = opened(3)
        outcomes = ranks.join()
        raised([outcomes.pop(odd)], OSError)
        for text in raised(outcomes, AbortedError):
            assert f"rank {odd} failed: OSError: no room" in text

        assert ranks.seconds < PROMPT
        assert len(fake.Store.closed) == len(fake.Store.opened) == 2

    def test_raises_on_every_rank(self, fake):
        def fail(ctx):
            raise OSError(f"no room on {ctx.rank}")

        fake.behave.update({rank: fail for rank in range(3)})
        outcomes = opened(3).join()
        assert [isinstance(outcome, OSError) for outcome in outcomes] == [True] * 3
        assert [str(outcome) for outcome in outcomes] == [f"no room on {rank}" for rank in range(3)]

    def test_close_that_raises_hides_nothing(self, fake):
        def fail(ctx):
            raise OSError("no room")

        def close(store):
            raise RuntimeError("in close")

        fake.behave[1] = fail
        fake.Store.close = close
        outcomes = opened(2).join()
        assert "rank 1 failed: OSError: no room" in raised(outcomes[:1], AbortedError)[0]

    def test_exits(self, fake):
        fake.behave[0] = lambda ctx: sys.exit(3)
        outcomes = opened(2).join()
        assert r"called sys.exit(3)" in raised(outcomes[:1], PluginError)[0]
        assert "rank 0 failed" in raised(outcomes[1:], AbortedError)[0]

    def test_is_interrupted(self, fake):
        def interrupt(ctx):
            raise KeyboardInterrupt

        fake.behave[0] = interrupt
        outcomes = opened(2).join()
        raised(outcomes[:1], KeyboardInterrupt)
        assert "rank 0 failed: KeyboardInterrupt" in raised(outcomes[1:], AbortedError)[0]

    @pytest.mark.parametrize(
        ("factory", "said"),
        [
            ("no_such_module_of_ours:Store", "can't be imported: ModuleNotFoundError"),
            ("json:no_such_attribute", "can't be imported: AttributeError"),
            ("json.decoder:JSONDecoder.no_such", "can't be imported: AttributeError"),
            ("plugin_that_raises_when_it_is_chosen:Store", "can't be imported: OSError: no driver"),
            ("json:__name__", "is not callable"),
            ("builtins:repr", "its factory returned str, not a TensorStore"),
        ],
    )
    def test_that_makes_no_store(self, site, factory, said):
        site.module("raise OSError('no driver')", name="plugin_that_raises_when_it_is_chosen")
        site.backend("odd-dist", "odd", factory=factory, plugin="odd")
        refresh()
        outcomes = opened(2).join()
        assert any(isinstance(outcome, PluginError) and said in str(outcome) for outcome in outcomes)
        for text in raised(outcomes, (PluginError, AbortedError)):
            assert said in text

    def test_that_is_slower_than_the_timeout(self, fake):
        done = threading.Event()
        fake.behave[1] = lambda ctx: done.wait(10)
        ranks = opened(2, timeout=SHORT)
        time.sleep(2 * SHORT)
        done.set()
        for text in raised(ranks.join(), StoreTimeoutError):
            assert "rank 0 gave up after 0.3 s: rank 1 had not built its handle" in text

        assert len(fake.Store.closed) == len(fake.Store.opened) == 2
