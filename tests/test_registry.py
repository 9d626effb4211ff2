"""Plugins registered by hand, and a registry that several threads use at once."""

from __future__ import annotations

import threading
import types
from pathlib import Path

import pytest

import dtorch_core
from dtorch_core import PluginError, explain, refresh
from dtorch_core._selection.registry import Registry, registry
from dtorch_core._selection.topology import imagine

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from plugin_sources import GOOD, hook, plugin

THREADS = 8


def together(call: object, count: int = THREADS) -> list[object]:
    """The results of ``call(i)`` in ``count`` threads that start at once."""
    start, results = threading.Barrier(count), [None] * count

    def run(i: int) -> None:
        start.wait(10)
        try:
            results[i] = call(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()

    return results


class TestRegister:
    def module(self, source: str = GOOD) -> types.ModuleType:
        module = types.ModuleType("by_hand")
        exec(source, module.__dict__)
        return module

    def test_registered_plugin_is_used_and_taken_back(self, site):
        dtorch_core.register(self.module(), name="mine")
        assert plugin("mine").state == "ok"
        assert explain("store", imagine(2), backend="good").chosen == "good"
        dtorch_core.unregister("mine")
        assert "good" not in registry().offers("store")

    def test_name_taken_twice(self, site):
        dtorch_core.register(self.module(), name="mine")
        try:
            with pytest.raises(ValueError, match="'mine' is registered already"):
                dtorch_core.register(self.module(), name="mine")
        finally:
            dtorch_core.unregister("mine")

    def test_unregister_an_unknown_name(self, site):
        with pytest.raises(LookupError, match="no plugin 'mine' was registered by hand"):
            dtorch_core.unregister("mine")

    def test_strict_mode_registers_nothing_broken(self, site):
        site.env("DTORCH_STRICT_PLUGINS", "1")
        with pytest.raises(PluginError, match="implements no hook"):
            dtorch_core.register(self.module(""), name="mine")

        refresh()
        assert "mine" not in [plugin.name for plugin in registry().plugins]

    def test_plugin_whose_properties_raise(self, site):
        class Bad:
            @property
            def dtorch_register_promises(self):
                raise ValueError("in a property")

        dtorch_core.register(Bad(), name="mine")
        try:
            assert plugin("mine").state == "broken"
        finally:
            dtorch_core.unregister("mine")


class TestThreads:
    def test_first_use_gives_every_thread_the_same_snapshot(self, site, monkeypatch):
        source = "import time\ntime.sleep(0.05)\nloads = globals().setdefault('loads', 0) + 1\n" + GOOD
        module = site.add("slow-dist", source, plugin="slow")
        monkeypatch.setattr("dtorch_core._selection.registry._current", None)
        snapshots = together(lambda i: registry())
        assert all(isinstance(snapshot, Registry) for snapshot in snapshots)
        assert len({id(snapshot) for snapshot in snapshots}) == 1
        assert plugin("slow").state == "ok"
        assert site.loaded(module).loads == 1

    def test_plugins_registered_at_once_are_all_there(self, site):
        module = TestRegister().module(hook("return None", "dtorch_rank_backends"))
        names = [f"of thread {i}" for i in range(THREADS)]
        try:
            for _ in range(5):
                assert together(lambda i: dtorch_core.register(module, name=names[i])) == [None] * THREADS
                assert set(names) <= {plugin.name for plugin in registry().plugins}
                assert together(lambda i: dtorch_core.unregister(names[i])) == [None] * THREADS
                assert not set(names) & {plugin.name for plugin in registry().plugins}
        finally:
            for name in names:
                try:
                    dtorch_core.unregister(name)
                except LookupError:
                    pass

    def test_selection_goes_on_while_plugins_are_refreshed(self, site):
        site.add("good-dist", GOOD, plugin="good")
        refresh()

        def call(i: int) -> object:
            for _ in range(20):
                if i % 2:
                    refresh()
                else:
                    assert explain("store", imagine(2), backend="good").chosen == "good"

        assert together(call) == [None] * THREADS
