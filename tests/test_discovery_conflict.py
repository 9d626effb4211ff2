"""Two plugins that offer a backend of the same name: neither is used."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtorch_core
from dtorch_core import PluginError, explain, refresh
from dtorch_core._selection.topology import imagine

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from plugin_sources import hook, plugin, spec, stores


class TestConflict:
    @pytest.fixture(autouse=True)
    def _two(self, site):
        self.site = site
        more = hook(f"return [{spec('only_one')}]", "dtorch_register_promises")
        site.add("one-dist", stores(spec("clash"), spec("mine")) + more, plugin="one", version="1.5")
        site.add("two-dist", stores(spec("clash")), plugin="two", version="2.5")
        refresh()

    def test_both_are_listed_as_broken(self):
        assert "its store backend 'clash' is also offered by two-dist 2.5; neither is used" in plugin("one").why
        assert "its store backend 'clash' is also offered by one-dist 1.5; neither is used" in plugin("two").why
        assert plugin("one").state == plugin("two").state == "broken"

    def test_neither_is_used(self):
        verdicts = [v for v in explain("store", imagine(2)).verdicts if v.name == "clash"]
        assert {(v.distribution, v.state) for v in verdicts} == {("one-dist", "broken"), ("two-dist", "broken")}
        assert explain("store", imagine(2), backend="clash").chosen is None

    def test_asking_by_name_names_both(self):
        with pytest.raises(dtorch_core.BackendConflictError, match="one-dist 1.5 and two-dist 2.5") as caught:
            dtorch_core.select("store", imagine(2), backend="clash")

        assert "uninstall all but one" in str(caught.value)

    def test_the_rest_works(self):
        assert dtorch_core.select("store", imagine(2), backend="mine").chosen == "mine"
        assert dtorch_core.select("promise", imagine(2), backend="only_one").chosen == "only_one"

    def test_disabling_one_ends_it(self):
        self.site.env("DTORCH_DISABLE_PLUGINS", "two")
        refresh()
        assert plugin("one").state == "ok"
        assert dtorch_core.select("store", imagine(2), backend="clash").chosen == "clash"

    def test_strict_mode_raises(self):
        self.site.env("DTORCH_STRICT_PLUGINS", "1")
        with pytest.raises(PluginError, match="'clash' is also offered by"):
            refresh()

    def test_same_name_in_another_kind_is_no_conflict(self, site):
        site.add("three-dist", hook(f"return [{spec('mine')}]", "dtorch_register_promises"), plugin="three")
        refresh()
        assert plugin("three").state == "ok"
