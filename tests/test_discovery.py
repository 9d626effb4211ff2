"""Plugins are found through real metadata, and listing them costs little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dtorch_core import refresh
from dtorch_core._selection.registry import registry

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from plugin_sources import GOOD, HEAD, hook, plugin, spec


class TestFound:
    def test_one_distribution_seen_twice_is_one_plugin(self, site, tmp_path):
        module = site.add("twice-dist", GOOD, plugin="twice")
        other = site.also_on_path(tmp_path / "lib64")
        site.point("Twice_Dist", module, plugin="twice", folder=other)
        refresh()
        assert plugin("twice").state == "ok"
        assert len(registry().offers("store")["good"]) == 1

    def test_first_version_on_the_path_hides_an_older_one(self, site, tmp_path):
        module = site.add("stale-dist", GOOD, plugin="one", version="1.0")
        other = site.also_on_path(tmp_path / "newer")
        site.point("stale-dist", module, plugin="one", version="2.0", folder=other)
        refresh()
        assert plugin("one").version == "2.0"

    def test_object_as_entry_point(self, site):
        source = HEAD + f"""
class Hooks:
    @hookimpl
    def dtorch_register_tensor_stores(self):
        yield {spec("of_an_object")}

hooks = Hooks()
"""
        site.point("object-dist", f"{site.module(source)}:hooks", plugin="thing")
        refresh()
        assert plugin("thing").state == "ok"
        assert "of_an_object" in registry().offers("store")

    def test_optional_hook_of_a_later_core_is_left_alone(self, site):
        later = "@hookimpl(optionalhook=True)\ndef dtorch_something_later(x): ...\n"
        site.add("later-dist", GOOD + later, plugin="later")
        refresh()
        assert plugin("later").state == "ok"
        assert list(plugin("later").calls) == ["dtorch_register_tensor_stores"]

    def test_plugin_without_backends_is_fine(self, site):
        site.add("policy-dist", hook("return None", "dtorch_rank_backends", "kind"), plugin="policy")
        refresh()
        assert plugin("policy").state == "ok"

    @pytest.mark.parametrize(
        "files",
        [
            {"METADATA": "Metadata-Version: 2.1\nName: bad-dist\n", "entry_points.txt": "[dtorch]\nno equals sign\n"},
            {"METADATA": "Metadata-Version: 2.1\nName: bad-dist\n", "entry_points.txt": "[dtorch]\nbad = no_module\n"},
            {"METADATA": "", "entry_points.txt": "[dtorch]\nbad = no_module\n"},
            {"entry_points.txt": "[dtorch]\nbad = no_module\n"},
            {"entry_points.txt": "[other]\nno equals sign\n"},
            {},
        ],
        ids=["unreadable", "no version", "empty metadata", "no metadata", "unreadable elsewhere", "empty folder"],
    )
    def test_damaged_metadata_stops_nobody(self, site, files):
        site.metadata("bad-dist", files)
        site.add("good-dist", GOOD)
        refresh()
        assert plugin("good-dist").state == "ok"
        unreadable = "no equals sign" in files.get("entry_points.txt", "")
        assert any("bad" in problem and "can't be read" in problem for problem in registry().problems) == unreadable

    def test_listing_imports_no_torch(self, site):
        site.add("heavy-dist", "import json\n" + GOOD, plugin="heavy")
        code = (
            f"import sys; sys.path.insert(0, {str(site.folder)!r})\n"
            "from dtorch_core._selection.registry import registry\n"
            "(heavy,) = [plugin for plugin in registry().plugins if plugin.name == 'heavy']\n"
            "assert heavy.state == 'ok' and not heavy.imports_torch\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_plugin_that_imports_torch_is_noted(self, site):
        site.module("", name="torch")
        site.add("heavy-dist", "import torch\n" + GOOD, plugin="heavy")
        code = (
            f"import sys; sys.path.insert(0, {str(site.folder)!r})\n"
            "from dtorch_core._selection.registry import registry\n"
            "assert [plugin.imports_torch for plugin in registry().plugins if plugin.name == 'heavy'] == [True]"
        )
        site.modules.discard("torch")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
