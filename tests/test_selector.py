"""Which backend fits best, and what is said where none does."""

import json
import re
from pathlib import Path

import pytest

from dtorch_core import BackendSpec, NoBackendError, Support, explain, refresh, select

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import selector_stores
    from selector_stores import HOSTS, PROCESSES, THREADS

stores = selector_stores.stores


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
