"""Each plugin is loaded alone; a broken one is listed and stops nobody else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dtorch_core
from dtorch_core import PluginVersionError, explain, refresh
from dtorch_core._selection.registry import registry
from dtorch_core._selection.topology import imagine

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from plugin_sources import GOOD, HEAD, PROBE, hook, plugin, spec, stores

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
    "imports what is not there": (
        "import no_such_module_of_ours",
        ["No module named 'no_such_module_of_ours'", "`pip check` names"],
    ),
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
        ["dtorch_register_tensor_stores takes topology, which can not be found", "given no arguments (/", ".py:"],
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
    "needs an unknown capability of its store": (
        stores(spec(more=", store_needs={'zerocopy'}")),
        ["unknown capability of its store, 'zerocopy'", "Did you mean 'zero_copy'?"],
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
