"""Which plugins are loaded, and how strictly, as the environment says it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

import dtorch_core
from dtorch_core import PluginError, PluginVersionError, explain, refresh
from dtorch_core._selection.registry import registry
from dtorch_core._selection.topology import imagine

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from plugin_sources import plugin, spec, stores


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def _installed(self, site):
        self.site = site
        site.add("first-dist", stores(spec("first_backend")), plugin="first")
        site.add("second-dist", stores(spec("second_backend")), plugin="second")

    def states(self) -> tuple[str, str]:
        refresh()
        return plugin("first").state, plugin("second").state

    @pytest.mark.parametrize("name", ["first", "first-dist", "First_Dist", " first , no-such-one"])
    def test_disable_by_plugin_or_distribution(self, name):
        self.site.env("DTORCH_DISABLE_PLUGINS", name)
        assert self.states() == ("disabled", "ok")
        assert plugin("first").why == "disabled by DTORCH_DISABLE_PLUGINS"
        assert "first_backend" not in registry().offers("store")

    def test_disabled_plugin_is_not_imported(self):
        module = self.site.add("third-dist", "raise ValueError('imported')", plugin="third")
        self.site.env("DTORCH_DISABLE_PLUGINS", "third")
        refresh()
        assert plugin("third").state == "disabled"
        assert module not in sys.modules

    def test_asking_for_a_disabled_plugin_says_so(self):
        self.site.env("DTORCH_DISABLE_PLUGINS", "first")
        refresh()
        assert explain("store", imagine(2)).verdict("first").state == "absent"
        with pytest.raises(dtorch_core.NoBackendError, match="is absent: disabled by DTORCH_DISABLE_PLUGINS"):
            dtorch_core.select("store", imagine(2), backend="first")

    @pytest.mark.parametrize(
        ("value", "states"),
        [("second", ("disabled", "ok")), ("", ("disabled", "disabled")), ("first-dist,second", ("ok", "ok"))],
    )
    def test_load_is_an_allow_list(self, value, states):
        self.site.env("DTORCH_LOAD_PLUGINS", value)
        assert self.states() == states

    def test_disable_wins_over_load(self):
        self.site.env("DTORCH_LOAD_PLUGINS", "first,second")
        self.site.env("DTORCH_DISABLE_PLUGINS", "first")
        assert self.states() == ("disabled", "ok")

    @pytest.mark.parametrize("variable", ["DTORCH_DISABLE_PLUGINS", "DTORCH_LOAD_PLUGINS"])
    def test_unknown_name_is_reported(self, variable, caplog):
        self.site.env(variable, "frist, second")
        with caplog.at_level(logging.ERROR, "dtorch"):
            refresh()

        (problem,) = registry().problems
        assert f"{variable} names 'frist'" in problem
        assert "Did you mean 'first'?" in problem
        assert problem in caplog.text

    @pytest.mark.parametrize("value", ["", "0"])
    def test_strict_mode_off(self, value):
        self.site.env("DTORCH_STRICT_PLUGINS", value)
        self.site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        refresh()
        assert plugin("bad").state == "broken"

    def test_strict_mode_raises_for_a_broken_plugin(self):
        self.site.env("DTORCH_STRICT_PLUGINS", "1")
        self.site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        with pytest.raises(PluginError, match="'bad' of bad-dist 1.0 is broken: ValueError: at import") as caught:
            refresh()

        assert "DTORCH_DISABLE_PLUGINS=bad" in str(caught.value)
        assert isinstance(caught.value.__cause__, ValueError)

    def test_strict_mode_raises_the_version_error(self):
        self.site.env("DTORCH_STRICT_PLUGINS", "1")
        self.site.add("new-dist", stores(spec(more=", api=99")), plugin="new")
        with pytest.raises(PluginVersionError):
            refresh()

    def test_strict_mode_leaves_the_last_snapshot(self):
        refresh()
        before = registry()
        self.site.env("DTORCH_STRICT_PLUGINS", "1")
        self.site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        with pytest.raises(PluginError):
            refresh()

        assert registry() is before

    def test_strict_mode_lets_a_disabled_plugin_be(self):
        self.site.env("DTORCH_STRICT_PLUGINS", "1")
        self.site.env("DTORCH_DISABLE_PLUGINS", "bad")
        self.site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        assert self.states() == ("ok", "ok")
