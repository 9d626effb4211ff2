"""Who decides which backend is used, and what is said where none is."""

from __future__ import annotations

import json
import logging
import re
import threading

import pytest

import dtorch_core
from dtorch_core import BackendSpec, NoBackendError, Support, explain, refresh, select, use_backend
from dtorch_core._selection.authority import VARIABLES, asked_for
from dtorch_core._selection.registry import registry
from dtorch_core._selection.topology import imagine

THREADS = imagine(4)
PROCESSES = imagine(4, "processes")
HOSTS = imagine(4, "processes", hosts=2)

POLICY = """
    from dtorch_core import hookimpl

    calls = []

    @hookimpl
    def dtorch_rank_backends(kind, topology, verdicts):
        calls.append((kind, topology, verdicts))
        {body}
"""


def states(selection):
    return {verdict.name: verdict.state for verdict in selection.verdicts}


@pytest.fixture
def stores(site):
    """Four stores: ``best`` and ``fair`` fit everything, ``local`` fits one process, ``never`` fits nothing."""
    site.backend("best-dist", "best", "Support.yes(2000, 'best of all')", plugin="best")
    site.backend("fair-dist", "fair", "Support.yes(1500, 'fair enough')", plugin="fair")
    local = "Support.yes(500, 'one process') if topology.same_process else Support.no('several processes')"
    site.backend("local-dist", "local", local, plugin="local")
    site.backend("never-dist", "never", "Support.no('it is not written yet')", plugin="never")
    refresh()
    return site


@pytest.fixture
def policy(stores):
    """Install a site policy whose hook's body is given; gives its module."""

    def add(body, distribution="policy-dist"):
        module = stores.add(distribution, POLICY.replace("{body}", body), plugin=distribution)
        refresh()
        return stores.loaded(module)

    return add


class TestScore:
    def test_highest_score_wins(self, stores):
        selection = select("store", THREADS)
        assert (selection.chosen, selection.asked_by, selection.why) == ("best", "score", "best of all")

    def test_equal_scores_go_by_name(self, stores):
        stores.backend("also-dist", "also", "Support.yes(2000, 'as good')", plugin="zzz")
        refresh()
        assert select("store", THREADS).chosen == "also"

    def test_negative_score_still_fits(self, site):
        site.backend("last-dist", "last", "Support.yes(-5, 'if need be')", plugin="last")
        site.env("DTORCH_LOAD_PLUGINS", "last")
        refresh()
        assert select("store", THREADS).chosen == "last"

    def test_every_backend_is_in_the_explanation_best_first(self, stores):
        selection = explain("store", PROCESSES)
        names = [v.name for v in selection.verdicts if v.name in ("best", "fair", "local", "never")]
        assert names == ["best", "fair", "local", "never"]
        assert selection.verdict("local").why == "several processes"
        order = ["yes", "no", "broken", "absent"]
        assert sorted(selection.verdicts, key=lambda v: order.index(v.state)) == list(selection.verdicts)

    def test_explanation_reads_as_a_table(self, stores):
        lines = str(explain("store", PROCESSES)).splitlines()
        assert lines[0] == "store for 4 ranks, processes of one host, sharing cpu: best (decided by score)"
        assert lines[1].split() == ["->", "best", "yes", "2000", "best-dist", "1.0", "best", "of", "all"]
        assert [line.split()[:3] for line in lines if " never " in line] == [["never", "no", "-"]]
        assert all("\n" not in line and line.startswith("  ") for line in lines[1:])

    def test_explanation_is_json(self, stores):
        fields = json.loads(json.dumps(explain("store", PROCESSES).to_dict()))
        assert (fields["kind"], fields["chosen"], fields["asked_by"]) == ("store", "best", "score")
        best = fields["verdicts"][0]
        assert best == {
            "name": "best",
            "distribution": "best-dist",
            "version": "1.0",
            "state": "yes",
            "score": 2000,
            "why": "best of all",
        }

    def test_unknown_kind(self, site):
        for call in (explain, select):
            with pytest.raises(ValueError, match="one of store, group, promise, not 'shop'"):
                call("shop", THREADS)

            with pytest.raises(ValueError, match="one of store, group, promise, not 'shop'"):
                call("shop", THREADS, backend="x")


class TestProbe:
    @pytest.mark.parametrize(
        ("probe", "said"),
        [
            ("1 / 0", "its probe raised ZeroDivisionError: division by zero"),
            ("__import__('sys').exit(9)", "its probe raised SystemExit: 9"),
            ("__import__('no_such_module_of_ours')", "its probe raised ModuleNotFoundError"),
            ("None", "its probe returned NoneType, not Support.yes(...) or Support.no(...)"),
            ("True", "its probe returned bool"),
            ("Support.yes(1, '  ')", "Support needs a reason"),
            ("Support.no('')", "Support needs a reason"),
            ("Support.yes('high', 'x')", "takes an int score, not 'high'"),
            ("Support(True, 'high', 'x')", "takes an int score, not 'high'"),
            ("topology.no_such_question", "AttributeError"),
        ],
    )
    def test_bad_probe_is_broken_and_stops_nobody(self, stores, probe, said):
        stores.backend("bad-dist", "bad", probe, plugin="bad")
        refresh()
        selection = select("store", THREADS)
        assert selection.chosen == "best"
        assert selection.verdict("bad").state == "broken"
        assert said in selection.verdict("bad").why
        with pytest.raises(NoBackendError, match="'bad' .* is broken: its probe"):
            select("store", THREADS, backend="bad")

    def test_text_of_several_lines_keeps_the_table_whole(self, stores):
        stores.backend("wordy-dist", "wordy", "Support.no('one\\ntwo\\n\\nthree')", plugin="wordy")
        refresh()
        assert [line for line in str(explain("store", THREADS)).splitlines() if line.endswith("one two three")]

    def test_support_and_spec_are_values(self):
        assert Support.yes(3, "x") == Support.yes(3, "x")
        spec = BackendSpec("a", "b:c", print, capabilities=["cpu", "cpu"])
        assert spec.capabilities == {"cpu"}
        with pytest.raises(AttributeError):
            spec.name = "other"


class TestAuthority:
    def test_order(self, stores, policy):
        module = policy("return ['fair']")
        assert select("store", THREADS).asked_by.startswith("policy of policy-dist")
        stores.env("DTORCH_TENSOR_STORE", "local")
        assert (select("store", THREADS).chosen, len(module.calls)) == ("local", 1)
        with use_backend(store="fair"):
            assert select("store", THREADS).asked_by == "use_backend"
            selection = select("store", THREADS, backend="best")
            assert (selection.chosen, selection.asked_by) == ("best", "argument")

        assert select("store", THREADS).asked_by == "environment DTORCH_TENSOR_STORE"
        assert len(module.calls) == 1

    @pytest.mark.parametrize("kind", VARIABLES)
    def test_variable_of_each_kind(self, site, kind):
        assert asked_for(kind, None) is None
        site.env(VARIABLES[kind], " mine ")
        assert asked_for(kind, None).name == "mine"
        assert [asked_for(other, None) for other in VARIABLES if other != kind] == [None, None]

    def test_empty_variable_says_nothing(self, stores):
        stores.env("DTORCH_TENSOR_STORE", " ")
        assert select("store", THREADS).chosen == "best"

    def test_use_backend_nested(self, stores):
        with use_backend(store="fair", group="x"):
            with use_backend(store="local"):
                assert asked_for("store", None).name == "local"
                assert asked_for("group", None).name == "x"

            assert asked_for("store", None).name == "fair"

        assert asked_for("store", None) is None

    def test_use_backend_ends_when_its_body_raises(self, site):
        with pytest.raises(KeyError), use_backend(store="fair"):
            raise KeyError

        assert asked_for("store", None) is None

    def test_use_backend_is_seen_by_other_threads(self, stores):
        found = []
        with use_backend(store="fair"):
            thread = threading.Thread(target=lambda: found.append(select("store", THREADS).chosen))
            thread.start()
            thread.join(10)

        assert found == ["fair"]

    def test_use_backend_in_two_threads_that_leave_in_the_order_they_came(self, site):
        first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
        seen = []

        def first():
            with use_backend(store="same"):
                first_in.set()
                assert second_in.wait(10)

            first_out.set()

        def second():
            assert first_in.wait(10)
            with use_backend(store="same"):
                second_in.set()
                assert first_out.wait(10)
                seen.append(asked_for("store", None))

            seen.append(asked_for("store", None))

        threads = [threading.Thread(target=first), threading.Thread(target=second)]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join(20)

        assert (seen[0].name, seen[1]) == ("same", None)

    def test_use_backend_without_a_name(self):
        with pytest.raises(TypeError, match="pass store=, group= or promise="), use_backend():
            pass

    def test_name_that_is_no_string(self, site):
        with pytest.raises(TypeError, match="by its name, a str, not by 3"):
            explain("store", THREADS, backend=3)

        with pytest.raises(TypeError, match="by its name"), use_backend(store=BackendSpec):
            pass

        assert asked_for("store", None) is None


class TestNamed:
    """A backend asked for by name is used, or raises its own reason; never another one."""

    WAYS = ["argument", "use_backend", "environment DTORCH_TENSOR_STORE"]

    def ask(self, site, way, name, topology=PROCESSES):
        if way == "argument":
            return select("store", topology, backend=name)

        if way == "use_backend":
            with use_backend(store=name):
                return select("store", topology)

        site.env("DTORCH_TENSOR_STORE", name)
        return select("store", topology)

    @pytest.mark.parametrize("way", WAYS)
    def test_that_fits(self, stores, way):
        selection = self.ask(stores, way, "fair")
        assert (selection.chosen, selection.asked_by) == ("fair", way)

    @pytest.mark.parametrize("way", WAYS)
    def test_that_does_not_fit(self, stores, way):
        with pytest.raises(NoBackendError) as caught:
            self.ask(stores, way, "local")

        assert str(caught.value) == (
            f"store backend 'local' (asked for by {way}) does not fit 4 ranks, processes of one host, sharing cpu: "
            "several processes"
        )

    @pytest.mark.parametrize("way", WAYS)
    def test_that_is_unknown(self, stores, way):
        with pytest.raises(NoBackendError) as caught:
            self.ask(stores, way, "bets")

        text = str(caught.value)
        assert f"there is no store backend 'bets' (asked for by {way}). Did you mean 'best'?" in text
        installed = text.partition("Installed: ")[2].partition(".")[0].split(", ")
        assert {"best", "fair", "local"} <= set(installed) and installed == sorted(installed)

    @pytest.mark.parametrize("way", WAYS)
    def test_that_is_broken(self, stores, way):
        stores.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        refresh()
        with pytest.raises(NoBackendError, match=r"'bad' \(asked for by .*\) is broken: ValueError: at import"):
            self.ask(stores, way, "bad")

    def test_that_is_not_installed(self, stores):
        stores.env("DTORCH_LOAD_PLUGINS", "best")
        refresh()
        missing = next(v for v in explain("group", THREADS).verdicts if v.name == "samedevice")
        assert missing.state == "absent"
        with pytest.raises(NoBackendError, match="'samedevice' .* is absent"):
            select("group", THREADS, backend="samedevice")

    def test_that_is_reserved(self, stores):
        with pytest.raises(NoBackendError, match="'network' .* is absent: reserved for several hosts"):
            self.ask(stores, "argument", "network")

    def test_explaining_raises_nothing(self, stores):
        for name in ("local", "bets", "network"):
            selection = explain("store", PROCESSES, backend=name)
            assert selection.chosen is None
            assert "no backend fits (decided by argument)" in str(selection)


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


class TestRefusal:
    def test_lists_every_reason(self, site):
        site.backend("never-dist", "never", "Support.no('it is not written yet')", plugin="never")
        site.backend("bad-dist", "bad", "1 / 0", plugin="bad")
        site.env("DTORCH_LOAD_PLUGINS", "never,bad")
        refresh()
        with pytest.raises(NoBackendError) as caught:
            select("store", THREADS)

        text = str(caught.value)
        assert text.startswith(str(explain("store", THREADS)))
        assert "store for 4 ranks, threads of one process, sharing cpu: no backend fits (decided by score)" in text
        for words in ("it is not written yet", "ZeroDivisionError", "reserved for several hosts", "dtorch doctor"):
            assert words in text

    @pytest.mark.parametrize(
        ("kind", "command"),
        [
            ("store", "pip install dtorch-memory-store"),
            ("group", "pip install dtorch-samedevice-group"),
            ("promise", "pip install dtorch-memory-store"),
        ],
    )
    def test_names_the_command_where_nothing_is_installed(self, site, kind, command, monkeypatch):
        monkeypatch.setattr("dtorch_core._selection.metadata.entry_points", lambda: ([], []))
        refresh()
        with pytest.raises(NoBackendError, match=f"No {kind} backend is installed: {command}"):
            select(kind, THREADS)

    @pytest.mark.parametrize(
        ("variable", "value", "way"),
        [
            ("DTORCH_LOAD_PLUGINS", "", "add one to it"),
            ("DTORCH_DISABLE_PLUGINS", "dtorch-memory-store,dtorch-file-store", "take one out of it"),
        ],
    )
    def test_names_the_variable_that_keeps_out_what_is_installed(self, site, variable, value, way):
        pytest.importorskip("dtorch_memory_store")
        site.env(variable, value)
        refresh()
        with pytest.raises(NoBackendError) as caught:
            select("store", THREADS)

        last = str(caught.value).splitlines()[-1]
        assert re.fullmatch(rf"Installed store .*environment \(.*memory\): unset {variable}, or {way}", last)

    @pytest.mark.parametrize("kind", ["store", "promise", "group"])
    def test_several_hosts_name_what_is_reserved(self, site, kind):
        with pytest.raises(NoBackendError, match="Several hosts need a network backend, and those names are reserved"):
            select(kind, HOSTS)

    def test_backend_of_somebody_else_may_span_hosts(self, stores):
        assert select("store", HOSTS).chosen == "best"

    def test_inherits_the_builtin_error(self, site):
        with pytest.raises(LookupError):
            select("store", HOSTS)
