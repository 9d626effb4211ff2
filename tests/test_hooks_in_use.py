"""Hooks that observe: what they raise is reported and stops nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtorch_core
from dtorch_core import Topology, explain, refresh
from dtorch_core._selection.registry import MOST_PROBLEMS, registry
from dtorch_core._selection.topology import imagine

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from plugin_sources import hook


class TestHooksInUse:
    OBSERVER = """
        from dtorch_core import hookimpl

        seen = []

        @hookimpl
        def dtorch_backend_selected(selection):
            seen.append(selection)
            raise ValueError(f"observer {text}")
    """

    def topology(self) -> Topology:
        return imagine(2)

    def test_observers_errors_are_reported_and_never_raised(self, site):
        site.backend("a-store", "wins")
        module = site.add("observer-dist", self.OBSERVER.replace("{text}", "fails"), plugin="observer")
        second = site.add("second-observer", self.OBSERVER.replace("{text}", "two"), plugin="second")
        refresh()
        selection = dtorch_core.select("store", self.topology(), backend="wins")
        assert site.loaded(module).seen == [selection]
        assert site.loaded(second).seen == [selection]
        assert len([p for p in registry().problems if "dtorch_backend_selected of" in p]) == 2

    def test_observer_that_exits_is_reported(self, site):
        site.backend("a-store", "wins")
        site.add("observer-dist", hook("raise SystemExit(7)", "dtorch_backend_selected"), plugin="observer")
        refresh()
        assert dtorch_core.select("store", self.topology(), backend="wins").chosen == "wins"
        assert any("SystemExit: 7" in problem for problem in registry().problems)

    def test_explaining_tells_no_observer(self, site):
        site.backend("a-store", "wins")
        module = site.add("observer-dist", self.OBSERVER, plugin="observer")
        refresh()
        explain("store", self.topology())
        assert site.loaded(module).seen == []

    def test_problems_are_bounded(self, site):
        site.backend("a-store", "wins")
        text = self.OBSERVER.replace("{text}", "{len(seen)}")
        site.add("observer-dist", text, plugin="observer")
        refresh()
        for _ in range(MOST_PROBLEMS + 20):
            dtorch_core.select("store", self.topology(), backend="wins")

        assert len(registry().problems) == MOST_PROBLEMS
