"""Ranks that open a name together agree on a backend, from facts that they all see."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dtorch_core import NoBackendError, StoreTimeoutError, open_store, refresh
from dtorch_core._selection.registry import registry

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import opening_ranks
    from opening_ranks import LONG, PROMPT, SHORT, Ranks, opened, raised

fake = opening_ranks.fake


class TestAgreement:
    def test_ranks_that_name_different_backends(self, fake, site):
        site.backend("other-dist", "other", plugin="other")
        refresh()
        ranks = opened(3, backend=lambda rank: "other" if rank == 1 else None)
        for text in raised(ranks.join(), NoBackendError):
            assert "the ranks do not agree on a store backend" in text
            assert "rank 0: fake (decided by score)" in text
            assert "rank 1: other (decided by argument)" in text
            assert "rank 2: fake (decided by score)" in text

        assert ranks.seconds < PROMPT

    def test_one_rank_that_can_not_choose(self, fake):
        for text in raised(opened(2, backend=lambda rank: "fkae" if rank == 1 else None).join(), NoBackendError):
            assert "rank 0: fake (decided by score)" in text
            assert "rank 1: there is no store backend 'fkae' (asked for by argument). Did you mean 'fake'?" in text

    def test_all_ranks_that_can_not_choose_raise_their_own_reason(self, fake):
        for text in raised(opened(2, backend="network").join(), NoBackendError):
            assert text.startswith("store backend 'network' (asked for by argument) is absent")

    def test_observers_hear_of_a_choice_on_every_rank_and_of_no_disagreement(self, fake, site):
        source = """
            from dtorch_core import hookimpl
            seen = []

            @hookimpl
            def dtorch_backend_selected(selection):
                seen.append(selection)
        """
        observer = site.add("observer-dist", source)
        refresh()
        opened(2, backend=lambda rank: "fake" if rank else "fkae").join()
        assert site.loaded(observer).seen == []
        stores = opened(3).join()
        assert [s.chosen for s in site.loaded(observer).seen] == ["fake"] * 3
        assert stores[0].selection in site.loaded(observer).seen

    def test_rank_whose_device_is_not_there_has_not_come(self, fake):
        outcomes = opened(3, device=lambda rank: "cuda:99" if rank == 2 else "cpu", timeout=SHORT).join()
        raised(outcomes[2:], ValueError)
        for text in raised(outcomes[:2], StoreTimeoutError):
            assert "rank 2 had not come" in text

    def test_probe_that_answers_differently_on_one_rank(self, fake, site):
        probe = "Support.yes(9000, 'x') if __import__('threading').current_thread().name == 'odd' else Support.no('y')"
        site.backend("moody-dist", "moody", probe, plugin="moody")
        refresh()

        def odd():
            threading.current_thread().name = "odd"
            return open_store("x", rank=1, world_size=2, timeout=LONG)

        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=LONG), odd])
        for text in raised(ranks.join(), NoBackendError):
            assert "rank 0: fake (decided by score)" in text
            assert "rank 1: moody (decided by score)" in text


class TestFacts:
    PLUGIN = """
        from dtorch_core import hookimpl

        @hookimpl
        def dtorch_describe_member(member):
            {body}
    """

    def describe(self, site, body, plugin):
        site.add(f"{plugin}-dist", self.PLUGIN.replace("{body}", body), plugin=plugin)
        refresh()

    def test_reach_the_probe_on_every_rank(self, site):
        probe = "Support.yes(1000, ' '.join(member.facts['big.pages'] for member in topology))"
        module = site.module(site.STORE)
        site.backend("big-dist", "big", probe, factory=f"{module}:Store", plugin="big")
        self.describe(site, "return {'big.pages': f'{member.rank} of {member.device}'}", "facts")
        for store in opened(3).join():
            assert store.selection.why == "0 of cpu 1 of cpu 2 of cpu"

    def test_two_plugins_can_not_change_each_others(self, fake, site):
        self.describe(site, "return {'one.x': 'first', 'one.y': 'kept'}", "a-facts")
        self.describe(site, "return {'one.x': 'second', 'two.x': 'mine'}", "b-facts")
        (store,) = opened(1).join()
        assert store.topology[0].facts == {"one.x": "first", "one.y": "kept", "two.x": "mine"}
        (problem,) = registry().problems
        assert "dtorch_describe_member of b-facts-dist 1.0: the fact 'one.x' is another plugin's" in problem

    @pytest.mark.parametrize("body", ["return {'x': 1}", "return {1: 'x'}", "return ['x']", "return None", "1 / 0"])
    def test_bad_ones_are_reported_and_left_out(self, fake, site, body):
        self.describe(site, body, "bad")
        self.describe(site, "return {'good.fact': 'here'}", "good")
        for store in opened(2).join():
            assert store.topology[1].facts == {"good.fact": "here"}

        assert all("dtorch_describe_member of bad-dist 1.0" in problem for problem in registry().problems)
        assert registry().problems
