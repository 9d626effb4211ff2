"""Plugins are found through real metadata, each loaded alone; a broken one is listed and stops nobody else."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import types

import pytest

import dtorch_core
from dtorch_core import PluginError, PluginVersionError, Topology, explain, refresh
from dtorch_core._discovery import Plugin
from dtorch_core._registry import MOST_PROBLEMS, Registry, registry
from dtorch_core._topology import imagine

THREADS = 8
HEAD = "from dtorch_core import BackendSpec, Support, hookimpl\n"
PROBE = "lambda topology: Support.yes(1, 'fits')"
GOOD = HEAD + f"""
@hookimpl
def dtorch_register_tensor_stores():
    return [BackendSpec("good", "no.such:Factory", {PROBE})]
"""


def stores(*specs: str) -> str:
    """A plugin that offers these stores."""
    return HEAD + f"@hookimpl\ndef dtorch_register_tensor_stores():\n    return [{', '.join(specs)}]\n"


def spec(name: str = "x", more: str = "") -> str:
    return f"BackendSpec({name!r}, 'a:b', {PROBE}{more})"


def hook(body: str, name: str = "dtorch_register_tensor_stores", arguments: str = "") -> str:
    return HEAD + f"@hookimpl\ndef {name}({arguments}):\n    {body}\n"


BROKEN = {
    "raises at import": ("raise ValueError('at import')", ["ValueError: at import", "plugin_"]),
    "raises from another error": (
        "try:\n    {}['the root']\nexcept KeyError as e:\n    raise RuntimeError('outer') from e",
        ["KeyError: 'the root'"],
    ),
    "raises while it handles another error": (
        "try:\n    {}['the root']\nexcept KeyError:\n    raise RuntimeError('outer')",
        ["KeyError: 'the root'"],
    ),
    "raises an error that can't be printed": (
        "class E(Exception):\n    def __str__(self): raise OSError\nraise E",
        ["E: its message can't be printed"],
    ),
    "raises no Exception": ("class E(BaseException): ...\nraise E('base')", ["E: base"]),
    "imports what is not there": ("import no_such_module_of_ours", ["No module named 'no_such_module_of_ours'"]),
    "exits at import": ("import sys\nsys.exit(3)", ["SystemExit: 3"]),
    "has a syntax error": ("def broken(:", ["SyntaxError"]),
    "exits in a hook": (hook("raise SystemExit(4)"), ["dtorch_register_tensor_stores: SystemExit: 4"]),
    "raises in a hook": (
        hook("raise ValueError('in the hook')"),
        ["dtorch_register_tensor_stores: ValueError: in the hook"],
    ),
    "raises in the last hook": (
        GOOD.replace('"good"', '"x"') + hook("raise ValueError('late')", "dtorch_register_promises"),
        ["dtorch_register_promises: ValueError: late"],
    ),
    "raises in a generator": (hook(f"yield {spec()}; raise ValueError('second')"), ["ValueError: second"]),
    "returns None": (hook("return None"), ["must return BackendSpecs in a list, not NoneType"]),
    "returns a string": (hook("return 'memory'"), ["not str"]),
    "returns one spec": (hook(f"return {spec()}"), ["not BackendSpec"]),
    "returns a list of names": (hook("return ['memory']"), ["must return BackendSpecs, not str"]),
    "returns a coroutine": (
        HEAD + f"@hookimpl\nasync def dtorch_register_tensor_stores():\n    return [{spec()}]\n",
        ["not coroutine"],
    ),
    "misspells a hook": (
        hook("return []", "dtorch_register_tensor_store"),
        ["unknown hook, dtorch_register_tensor_store.", "Did you mean 'dtorch_register_tensor_stores'?"],
    ),
    "has a hook with wrong arguments": (
        hook("return []", arguments="topology"),
        ["dtorch_register_tensor_stores", "topology", "can not be found"],
    ),
    "has no hook": ("x = 1", ["implements no hook", "@hookimpl"]),
    "forgets to mark its hook": (
        "def dtorch_register_tensor_stores(): return []",
        ["dtorch_register_tensor_stores lacks the @hookimpl decorator"],
    ),
    "forgets to mark one of two hooks": (
        GOOD.replace('"good"', '"x"') + "def dtorch_register_promises(): return []",
        ["dtorch_register_promises lacks the @hookimpl decorator"],
    ),
    "has an old wrapper": (
        HEAD + "@hookimpl(hookwrapper=True)\ndef dtorch_register_tensor_stores():\n    yield\n",
        ["dtorch_register_tensor_stores is a hook wrapper"],
    ),
    "has a wrapper": (
        HEAD + "@hookimpl(wrapper=True)\ndef dtorch_register_tensor_stores():\n    return (yield)\n",
        ["dtorch_register_tensor_stores is a hook wrapper"],
    ),
    "is for a later API": (
        stores(spec(more=", api=99")),
        ["hook API 99", "knows API 1", "pip install --upgrade dtorch-core"],
    ),
    "is for API 0": (stores(spec(more=", api=0")), ["hook API 0 never existed"]),
    "passes fields of a later core": (stores(spec(more=", colour='red'")), ["TypeError", "colour"]),
    "declares an unknown capability": (
        stores(spec(more=", capabilities={'zerocopy'}")),
        ["unknown store capability 'zerocopy'", "Did you mean 'zero_copy'?"],
    ),
    "declares a capability of another kind": (
        stores(spec(more=", capabilities={'await'}")),
        ["unknown store capability 'await'"],
    ),
    "gives its capabilities as one string": (stores(spec(more=", capabilities='cpu'")), ["a set of words"]),
    "offers one name twice": (stores(spec(), spec()), ["offers the store backend 'x' twice"]),
    "gives no name": (stores(spec("")), ["BackendSpec.name must be a non-empty string"]),
    "gives a factory without a colon": (
        stores(f"BackendSpec('x', 'a.b', {PROBE})"),
        ["backend 'x': factory must read 'package.module:callable', not 'a.b'"],
    ),
    "gives a probe that can't be called": (stores("BackendSpec('x', 'a:b', 3)"), ["probe must be callable, not 3"]),
    "gives an API that is no number": (stores(spec(more=", api='1'")), ["api must be an int, not '1'"]),
    "asks for the plugins while they are loaded": (
        hook("import dtorch_core; dtorch_core.refresh()"),
        ["asked for the plugins while they are loaded"],
    ),
}


def plugin(name: str) -> Plugin:
    (found,) = [plugin for plugin in registry().listing() if plugin.name == name]
    return found


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


class TestBroken:
    @pytest.mark.parametrize("case", BROKEN)
    def test_plugin_that(self, site, case):
        source, said = BROKEN[case]
        site.add("a-before", GOOD.replace('"good"', '"before"'))
        module = site.module(source)
        site.point("bad-dist", module, plugin="bad")
        site.add("z-after", GOOD.replace('"good"', '"after"'))
        refresh()

        bad = plugin("bad")
        assert bad.state == "broken"
        assert (bad.distribution, bad.version, bad.value) == ("bad-dist", "1.0", module)
        for words in said:
            assert words in bad.why

        assert "\n" not in bad.why
        assert {"before", "after"} <= registry().offers("store").keys()
        states = [v.state for v in explain("store", imagine(2)).verdicts if v.distribution == "bad-dist"]
        assert set(states) == {"broken"}

    def test_place_of_the_error_is_the_plugins_own_line(self, site):
        module = site.module("\n\nx = 1\nraise ValueError('here')")
        site.point("bad-dist", module, plugin="bad")
        refresh()
        assert f"{module}.py:5)" in plugin("bad").why

    def test_place_of_a_wrong_spec_is_the_plugins_own_line(self, site):
        module = site.module(stores("BackendSpec('x', 'a.b', print)"))
        site.point("bad-dist", module, plugin="bad")
        refresh()
        assert f"{module}.py:" in plugin("bad").why

    @pytest.mark.parametrize("value", ["no_such_module_at_all", "json:no_such_attribute", "not a valid : value !!"])
    def test_entry_point_that_leads_nowhere(self, site, value):
        site.point("bad-dist", value, plugin="bad")
        site.add("good-dist", GOOD)
        refresh()
        assert plugin("bad").state == "broken"
        assert plugin("good-dist").state == "ok"

    def test_broken_plugin_stands_under_its_own_name_in_the_explanation(self, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        refresh()
        verdict = explain("store", imagine(2)).verdict("bad")
        assert (verdict.state, verdict.distribution, verdict.version) == ("broken", "bad-dist", "1.0")
        assert "ValueError: at import" in verdict.why

    def test_broken_plugin_of_a_known_distribution_stands_under_its_backends(self, site):
        site.add("dtorch-memory-store", "raise ValueError('half an upgrade')", plugin="hides-the-installed-one")
        refresh()
        assert explain("store", imagine(2)).verdict("memory").state == "broken"
        assert explain("promise", imagine(2)).verdict("memory").state == "broken"
        assert explain("group", imagine(2)).verdict("memory") is None
        with pytest.raises(dtorch_core.NoBackendError, match="'memory' .* is broken: ValueError: half an upgrade"):
            dtorch_core.select("store", imagine(2), backend="memory")

    def test_error_is_kept_as_the_cause(self, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        refresh()
        with pytest.raises(dtorch_core.NoBackendError, match="is broken: ValueError: at import") as caught:
            dtorch_core.select("store", imagine(2), backend="bad")

        assert isinstance(caught.value.__cause__, ValueError)

    def test_later_api_raises_its_own_error_when_it_is_named(self, site):
        site.add("new-dist", stores(spec("new", ", api=99")))
        refresh()
        with pytest.raises(PluginVersionError, match="hook API 99"):
            dtorch_core.select("store", imagine(2), backend="new")

    def test_factory_is_not_imported_to_list_or_choose(self, site):
        factory = site.module("raise ValueError('imported')")
        site.backend("lazy-dist", "lazy", factory=f"{factory}:Store")
        refresh()
        assert dtorch_core.select("store", imagine(2), backend="lazy").chosen == "lazy"
        assert factory not in sys.modules


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
            "from dtorch_core._registry import registry\n"
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
            "from dtorch_core._registry import registry\n"
            "assert [plugin.imports_torch for plugin in registry().plugins if plugin.name == 'heavy'] == [True]"
        )
        site.modules.discard("torch")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
        monkeypatch.setattr("dtorch_core._registry._current", None)
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
