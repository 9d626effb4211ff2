"""What a site's policy decides, by the hook dtorch_rank_backends."""

import logging
from pathlib import Path

import pytest

import dtorch_core
from dtorch_core import NoBackendError, refresh, select
from dtorch_core._selection.registry import registry

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import selector_stores
    from selector_stores import PROCESSES, THREADS

stores = selector_stores.stores
policy = selector_stores.policy


class TestPolicy:
    def test_first_name_that_fits_is_chosen(self, policy):
        policy("return ['never', 'local', 'fair', 'best']")
        assert select("store", PROCESSES).chosen == "fair"
        assert select("store", THREADS).chosen == "local"

    def test_is_shown_kind_topology_and_verdicts(self, policy):
        module = policy("return None")
        selection = select("store", THREADS)
        assert module.calls == [("store", THREADS, selection.verdicts)]
        assert (selection.chosen, selection.asked_by) == ("best", "score")

    def test_may_take_fewer_arguments(self, stores):
        stores.add(
            "policy-dist",
            "from dtorch_core import hookimpl\n@hookimpl\ndef dtorch_rank_backends(topology):\n    return ['local']\n",
        )
        refresh()
        assert select("store", THREADS).chosen == "local"

    def test_names_left_out_are_not_used(self, policy):
        policy("return ['local'] if kind == 'store' else None")
        with pytest.raises(NoBackendError) as caught:
            select("store", PROCESSES)

        text = str(caught.value)
        assert "decided by policy of policy-dist, which allows local" in text
        assert "several processes" in text
        assert "best of all" in text

    def test_empty_list_allows_none(self, policy):
        policy("return []")
        with pytest.raises(NoBackendError, match="which allows none"):
            select("store", THREADS)

    def test_unknown_name_is_reported(self, policy, caplog):
        policy("return ['bets', 'fair']")
        with caplog.at_level(logging.ERROR, "dtorch"):
            assert select("store", THREADS).chosen == "fair"

        assert "names 'bets', which is no store backend. Did you mean 'best'?" in caplog.text
        assert registry().problems == [caplog.messages[0]]

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("return 'fair'", "must return a list of backend names or None, not 'fair'"),
            ("return {'fair'}", "must return a list of backend names"),
            ("return ['fair', 3]", "must return a list of backend names"),
            ("return 7", "must return a list of backend names"),
            ("raise ValueError('no policy today')", "ValueError: no policy today"),
            ("raise SystemExit(1)", "SystemExit: 1"),
        ],
    )
    def test_bad_policy_is_reported_and_left_out(self, policy, body, said):
        policy(body)
        selection = select("store", THREADS)
        assert (selection.chosen, selection.asked_by) == ("best", "score")
        (problem,) = registry().problems
        assert "dtorch_rank_backends of policy-dist 1.0" in problem
        assert said in problem

    def test_first_opinion_wins_and_ends_the_asking(self, policy):
        first = policy("return None", "a-policy")
        second = policy("return ['fair']", "b-policy")
        third = policy("return ['local']", "c-policy")
        selection = select("store", THREADS)
        assert (selection.chosen, selection.asked_by) == ("fair", "policy of b-policy, which allows fair")
        assert [len(module.calls) for module in (first, second, third)] == [1, 1, 0]

    def test_programs_own_policy_comes_before_installed_ones(self, policy):
        policy("return ['fair']", "a-policy")

        class Own:
            @dtorch_core.hookimpl
            def dtorch_rank_backends(self, kind):
                return ["local"]

        dtorch_core.register(Own(), name="zzz")
        try:
            assert select("store", THREADS).chosen == "local"
        finally:
            dtorch_core.unregister("zzz")

    def test_bends_to_a_name(self, policy):
        policy("return ['fair']")
        assert select("store", THREADS, backend="best").chosen == "best"
