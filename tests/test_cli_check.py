"""dtorch check: what the conformance kit finds of a backend, told by capability."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dtorch_core._selection import metadata
from dtorch_core.cli import check
from dtorch_core.testing._harness import DEVICES

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import command_runs
    from command_runs import fresh, source

dtorch = command_runs.dtorch


class TestCheck:
    @pytest.fixture
    def kit(self, monkeypatch):
        """The kit's outcomes as given, rather than a run of it."""
        from dtorch_core.testing import _run

        def give(*outcomes):
            def run_kit(kind, name, **options):
                return [_run.Outcome(test, frozenset(words), state, why) for test, words, state, why in outcomes]

            monkeypatch.setattr(_run, "run_kit", run_kit)

        return give

    def test_held(self, dtorch, site, kit):
        site.add("mine-dist", source("mine", words={"cpu", "cuda"}), plugin="mine")
        kit(
            ("test_all[x]", (), "passed", ""),
            ("test_each[cpu-2]", (), "passed", ""),
            ("test_words", ("cpu", "cuda"), "skipped", "there is no CUDA device"),
            ("test_gpu", ("cuda",), "skipped", "there is no CUDA device"),
            ("test_other", ("zero_copy",), "skipped", "not declared"),
        )
        status, out, _ = dtorch("check", "mine")
        assert status == 0
        assert out.splitlines() == [
            "store backend 'mine'",
            "  contract  held        1 passed",
            "  cpu       held        1 passed, 1 skipped",
            "  cuda      not tested  there is no CUDA device",
        ]

    def test_failed(self, dtorch, site, kit):
        site.add("mine-dist", source("mine", words={"cpu", "cuda", "multi_host"}), plugin="mine")
        kit(
            ("test_all", (), "passed", ""),
            ("test_each[cpu]", (), "passed", ""),
            ("test_each[cuda:0]", (), "failed", "assert 1 == 2"),
        )
        status, out, _ = dtorch("check", "mine")
        assert status == 1
        assert out.splitlines() == [
            "store backend 'mine'",
            "  contract    held        1 passed",
            "  cpu         held        1 passed",
            "  cuda        failed      1 failed of 1 test",
            "  multi_host  not tested  the kit has no test of it",
            "  FAILED test_each[cuda:0]: assert 1 == 2",
        ]
        facts = json.loads(dtorch("check", "mine", "--json")[1])
        assert facts["backend"] == "mine"
        assert facts["store"]["cuda"] == {
            "state": "failed",
            "passed": 0,
            "failed": 1,
            "skipped": 0,
            "failures": {"test_each[cuda:0]": "assert 1 == 2"},
        }

    def test_contract_that_fails(self, dtorch, site, kit):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        kit(("test_all", (), "failed", "hangs"), ("test_each[cpu]", (), "passed", ""))
        status, out, _ = dtorch("check", "mine")
        assert status == 1
        assert "  contract  failed  1 failed of 1 test\n" in out

    def test_nothing_declared(self, dtorch, site):
        site.add("mine-dist", source("mine"), plugin="mine")
        status, out, err = dtorch("check", "mine")
        assert (status, out) == (2, "")
        assert "the store backend 'mine' declares no capability" in err

    def test_unknown_name(self, dtorch, site):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        status, out, err = dtorch("check", "mien")
        assert (status, out) == (2, "")
        assert "there is no backend 'mien'. Did you mean 'mine'? Installed: " in err

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("samedevice", "not installed; pip install dtorch-samedevice-group"),
            ("file", "not installed; pip install dtorch-file-store"),
            ("network", "reserved for several hosts; no distribution offers it yet"),
            ("nccl", "not installed; pip install dtorch-nccl-group"),
        ],
    )
    def test_known_name_that_is_not_installed(self, dtorch, monkeypatch, name, said):
        monkeypatch.setattr(metadata, "entry_points", lambda: ([], []))
        status, out, err = dtorch("check", name)
        assert (status, out) == (2, "")
        assert err == f"dtorch check: error: there is no backend {name!r}: {said}\n"

    def test_name_of_a_disabled_plugin(self, dtorch, site):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        site.env("DTORCH_DISABLE_PLUGINS", "mine")
        status, _, err = dtorch("check", "mine")
        assert status == 2
        assert "there is no backend 'mine': " in err and "DTORCH_DISABLE_PLUGINS" in err

    def test_word_whose_tests_were_all_skipped_is_not_held(self, dtorch):
        pytest.importorskip("dtorch_memory_store")
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")

        facts = json.loads(dtorch("check", "memory", "--kind", "store", "--json")[1])["store"]
        assert facts["cpu"]["state"] == "held"
        assert facts["cuda"]["state"] == "not tested"

    def test_name_of_another_kind(self, dtorch, site):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        status, _, err = dtorch("check", "mine", "--kind", "group")
        assert status == 2
        assert "there is no group backend 'mine'" in err

    def test_broken_and_in_conflict(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.add("one-dist", source("clash", words={"cpu"}), plugin="one")
        site.add("two-dist", source("clash", words={"cpu"}), plugin="two")
        assert dtorch("check", "bad")[0] == dtorch("check", "clash")[0] == 1
        assert "the plugin of 'bad' is broken: ValueError: at import" in dtorch("check", "bad")[2]
        assert "'clash' is offered by one-dist 1.0 and two-dist 1.0" in dtorch("check", "clash")[2]

    @pytest.mark.parametrize(("missing", "command"), [("pytest", '"dtorch-core[testing]"'), ("torch", "torch")])
    def test_without_what_the_kit_needs(self, site, missing, command):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        done = fresh(site, f"import sys; sys.modules[{missing!r}] = None", "check", "mine")
        assert done.returncode == 1
        assert done.stderr == f"dtorch check: the conformance kit needs {missing}: pip install {command}\n"

    def test_memory_promise_holds_what_it_declares(self, dtorch):
        pytest.importorskip("dtorch_memory_store")
        status, out, _ = dtorch("check", "memory", "--kind", "promise", "--json")
        facts = json.loads(out)["promise"]
        assert status == 0, out
        assert facts["contract"]["state"] == facts["await"]["state"] == "held"
        assert {facts[device.partition(":")[0]]["state"] for device in DEVICES} == {"held"}

    def test_progress_is_shown_apart_from_what_is_found(self, dtorch):
        """Pytest's dots come on the standard error, so that the output can be read by a program."""
        pytest.importorskip("dtorch_memory_store")
        status, out, err = dtorch("check", "memory", "--kind", "promise", "--json", "-k", "void or no_such_test")
        assert status == 0
        facts = json.loads(out)["promise"]
        assert facts["contract"]["passed"] > 0
        assert "the kit of promise backends, against 'memory':\n" in err
        dots = sum(facts[word]["passed"] for word in facts)
        assert "." * dots in err and f"{dots} passed, " in err

    def test_verbose_names_the_tests(self, site):
        pytest.importorskip("dtorch_memory_store")
        done = fresh(site, "", "check", "memory", "--kind", "promise", "--verbose", "-k", "test_void_brings_none")
        assert done.returncode == 0, done.stderr
        assert "::test_void_brings_none PASSED" in done.stderr
        assert done.stdout == "promise backend 'memory'\n  contract  held  1 passed\n"

    def test_expression_that_picks_no_test(self, dtorch):
        pytest.importorskip("dtorch_memory_store")
        status, out, err = dtorch("check", "memory", "-k", "no_such_test")
        assert (status, out) == (2, "")
        assert "error: no test of the kit matches -k 'no_such_test'; dtorch check memory --verbose" in err

    def test_expression_that_is_none(self, dtorch):
        pytest.importorskip("dtorch_memory_store")
        status, out, err = dtorch("check", "memory", "--kind", "promise", "-k", "(")
        assert (status, out) == (1, "")
        assert "Wrong expression passed to '-k'" in err and "did not run to its end" in err

    def test_words_of_a_test(self):
        from dtorch_core.testing._run import Outcome

        def words(test, *capabilities):
            return check._words(Outcome(test, frozenset(capabilities), "passed", ""))

        assert words("test_x") == set()
        assert words("test_cpu") == set()
        assert words("test_x[cpu]") == {"cpu"}
        assert words("test_x[2-cuda:0-float32]", "await") == {"cuda", "await"}
        assert words("test_x[cpu to cuda]") == set()
