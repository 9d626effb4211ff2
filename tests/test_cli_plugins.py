"""dtorch plugins: what each plugin offers, whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import command_runs
    from command_runs import fresh, source

dtorch = command_runs.dtorch


class TestPlugins:
    def test_lists_what_each_offers(self, dtorch, site):
        module = site.add("mine-dist", source("my_store", words={"cpu", "zero_copy"}), plugin="mine", version="1.5")
        status, out, _ = dtorch("plugins")
        assert status == 0
        lines = out.splitlines()
        at = lines.index(f"mine  ok  mine-dist 1.5  ({module})")
        assert lines[at + 1].split() == ["store", "my_store", "cpu", "zero_copy"]
        assert lines[at + 2].split() == ["hooks", "dtorch_register_tensor_stores"]

    def test_json(self, dtorch, site):
        module = site.add("mine-dist", source("my_store", words={"cpu"}), plugin="mine")
        status, out, _ = dtorch("plugins", "--json")
        facts = json.loads(out)
        (mine,) = [plugin for plugin in facts["plugins"] if plugin["name"] == "mine"]
        assert status == 0
        assert mine == {
            "name": "mine",
            "distribution": "mine-dist",
            "version": "1.0",
            "module": module,
            "state": "ok",
            "why": "",
            "imports_torch": False,
            "hooks": ["dtorch_register_tensor_stores"],
            "backends": {"store": [{"name": "my_store", "capabilities": ["cpu"]}]},
        }
        assert facts["problems"] == []

    def test_shows_root_causes(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.add("exits-dist", "import sys; sys.exit(3)", plugin="exits")
        status, out, _ = dtorch("plugins")
        assert status == 0
        assert "bad  broken  bad-dist 1.0" in out
        assert "  ValueError: at import (" in out
        assert "  SystemExit: 3 (" in out

    def test_shows_a_conflict_on_both(self, dtorch, site):
        site.add("one-dist", source("clash"), plugin="one")
        site.add("two-dist", source("clash"), plugin="two")
        _, out, _ = dtorch("plugins")
        assert "its store backend 'clash' is also offered by two-dist 1.0; neither is used" in out
        assert "its store backend 'clash' is also offered by one-dist 1.0; neither is used" in out
        states = {plugin["name"]: plugin["state"] for plugin in json.loads(dtorch("plugins", "--json")[1])["plugins"]}
        assert states["one"] == states["two"] == "broken"

    def test_shows_what_is_disabled_and_names_that_nobody_has(self, dtorch, site):
        site.add("mine-dist", source("my_store"), plugin="mine")
        site.env("DTORCH_DISABLE_PLUGINS", "mine,mien")
        _, out, _ = dtorch("plugins")
        assert "mine  disabled  mine-dist 1.0" in out
        assert "problem: DTORCH_DISABLE_PLUGINS names 'mien'" in out

    def test_says_what_to_install_where_nothing_is(self, dtorch, monkeypatch):
        monkeypatch.setattr("dtorch_core._selection.metadata.entry_points", lambda: ([], []))
        status, out, _ = dtorch("plugins")
        assert status == 0
        assert "No store backend is installed: pip install dtorch-memory-store" in out
        assert "No group backend is installed: pip install dtorch-samedevice-group" in out

    def test_works_in_strict_mode(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.env("DTORCH_STRICT_PLUGINS", "1")
        status, out, _ = dtorch("plugins")
        assert status == 0
        assert "ValueError: at import" in out

    def test_needs_no_torch_beside_broken_plugins(self, site):
        site.add("mine-dist", source("my_store"), plugin="mine")
        site.add("bad-dist", "import torch", plugin="bad")
        site.add("exits-dist", "raise SystemExit(3)", plugin="exits")
        done = fresh(site, "import sys; sys.modules['torch'] = None", "plugins", "--json")
        assert done.returncode == 0, done.stderr
        states = {plugin["name"]: plugin["state"] for plugin in json.loads(done.stdout)["plugins"]}
        assert (states["mine"], states["bad"], states["exits"]) == ("ok", "broken", "broken")

    def test_imports_no_torch(self, site):
        site.add("mine-dist", source("my_store"), plugin="mine")
        code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
        done = fresh(site, code, "plugins")
        assert (done.returncode, done.stderr) == (0, "False\n")

    def test_names_a_plugin_that_imports_torch(self, site):
        site.add("heavy-dist", source("heavy", before="import torch"), plugin="heavy")
        done = fresh(site, "", "plugins")
        assert "problem: plugin 'heavy' of heavy-dist 1.0 imports torch to be listed" in done.stdout

    def test_what_a_plugin_prints_stays_out_of_the_answer(self, site):
        site.add("loud-dist", source("loud", before="print('hello from a plugin')"), plugin="loud")
        done = fresh(site, "", "plugins", "--json")
        assert "loud" in [plugin["name"] for plugin in json.loads(done.stdout)["plugins"]]
        assert "hello from a plugin" in done.stderr
