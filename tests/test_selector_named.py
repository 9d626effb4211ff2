"""Who may ask for a backend by its name: it is that one then, or none."""

import threading
from pathlib import Path

import pytest

from dtorch_core import BackendSpec, NoBackendError, explain, refresh, select, use_backend
from dtorch_core._selection.authority import VARIABLES, asked_for

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import selector_stores
    from selector_stores import PROCESSES, THREADS

stores = selector_stores.stores
policy = selector_stores.policy


class TestAuthority:
    def test_order(self, stores, policy):
        module = policy("return ['fair']")
        assert select("store", THREADS).asked_by.startswith("policy of policy-dist")
        stores.env("DTORCH_TENSOR_STORE", "local")
        assert (select("store", THREADS).chosen, len(module.calls)) == ("local", 1)
        with use_backend(store="fair"):
            assert select("store", THREADS).asked_by == "use_backend"
            selection = select("store", THREADS, backend="best")
            assert (selection.chosen, selection.asked_by) == ("best", "argument")

        assert select("store", THREADS).asked_by == "environment DTORCH_TENSOR_STORE"
        assert len(module.calls) == 1

    @pytest.mark.parametrize("kind", VARIABLES)
    def test_variable_of_each_kind(self, site, kind):
        assert asked_for(kind, None) is None
        site.env(VARIABLES[kind], " mine ")
        assert asked_for(kind, None).name == "mine"
        assert [asked_for(other, None) for other in VARIABLES if other != kind] == [None, None]

    def test_empty_variable_says_nothing(self, stores):
        stores.env("DTORCH_TENSOR_STORE", " ")
        assert select("store", THREADS).chosen == "best"

    def test_use_backend_nested(self, stores):
        with use_backend(store="fair", group="x"):
            with use_backend(store="local"):
                assert asked_for("store", None).name == "local"
                assert asked_for("group", None).name == "x"

            assert asked_for("store", None).name == "fair"

        assert asked_for("store", None) is None

    def test_use_backend_ends_when_its_body_raises(self, site):
        with pytest.raises(KeyError), use_backend(store="fair"):
            raise KeyError

        assert asked_for("store", None) is None

    def test_use_backend_is_seen_by_other_threads(self, stores):
        found = []
        with use_backend(store="fair"):
            thread = threading.Thread(target=lambda: found.append(select("store", THREADS).chosen))
            thread.start()
            thread.join(10)

        assert found == ["fair"]

    def test_use_backend_in_two_threads_that_leave_in_the_order_they_came(self, site):
        first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
        seen = []

        def first():
            with use_backend(store="same"):
                first_in.set()
                assert second_in.wait(10)

            first_out.set()

        def second():
            assert first_in.wait(10)
            with use_backend(store="same"):
                second_in.set()
                assert first_out.wait(10)
                seen.append(asked_for("store", None))

            seen.append(asked_for("store", None))

        threads = [threading.Thread(target=first), threading.Thread(target=second)]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join(20)

        assert (seen[0].name, seen[1]) == ("same", None)

    def test_use_backend_without_a_name(self):
        with pytest.raises(TypeError, match="pass store=, group= or promise="), use_backend():
            pass

    def test_name_that_is_no_string(self, site):
        with pytest.raises(TypeError, match="by its name, a str, not by 3"):
            explain("store", THREADS, backend=3)

        with pytest.raises(TypeError, match="by its name"), use_backend(store=BackendSpec):
            pass

        assert asked_for("store", None) is None


class TestNamed:
    """A backend asked for by name is used, or raises its own reason; never another one."""

    WAYS = ["argument", "use_backend", "environment DTORCH_TENSOR_STORE"]

    def ask(self, site, way, name, topology=PROCESSES):
        if way == "argument":
            return select("store", topology, backend=name)

        if way == "use_backend":
            with use_backend(store=name):
                return select("store", topology)

        site.env("DTORCH_TENSOR_STORE", name)
        return select("store", topology)

    @pytest.mark.parametrize("way", WAYS)
    def test_that_fits(self, stores, way):
        selection = self.ask(stores, way, "fair")
        assert (selection.chosen, selection.asked_by) == ("fair", way)

    @pytest.mark.parametrize("way", WAYS)
    def test_that_does_not_fit(self, stores, way):
        with pytest.raises(NoBackendError) as caught:
            self.ask(stores, way, "local")

        assert str(caught.value) == (
            f"store backend 'local' (asked for by {way}) does not fit 4 ranks, processes of one host, sharing cpu: "
            "several processes"
        )

    @pytest.mark.parametrize("way", WAYS)
    def test_that_is_unknown(self, stores, way):
        with pytest.raises(NoBackendError) as caught:
            self.ask(stores, way, "bets")

        text = str(caught.value)
        assert f"there is no store backend 'bets' (asked for by {way}). Did you mean 'best'?" in text
        installed = text.partition("Installed: ")[2].partition(".")[0].split(", ")
        assert {"best", "fair", "local"} <= set(installed) and installed == sorted(installed)

    @pytest.mark.parametrize("way", WAYS)
    def test_that_is_broken(self, stores, way):
        stores.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        refresh()
        with pytest.raises(NoBackendError, match=r"'bad' \(asked for by .*\) is broken: ValueError: at import"):
            self.ask(stores, way, "bad")

    def test_that_is_not_installed(self, stores):
        stores.env("DTORCH_LOAD_PLUGINS", "best")
        refresh()
        missing = next(v for v in explain("group", THREADS).verdicts if v.name == "samedevice")
        assert missing.state == "absent"
        with pytest.raises(NoBackendError, match="'samedevice' .* is absent"):
            select("group", THREADS, backend="samedevice")

    def test_that_is_reserved(self, stores):
        with pytest.raises(NoBackendError, match="'network' .* is absent: reserved for several hosts"):
            self.ask(stores, "argument", "network")

    def test_explaining_raises_nothing(self, stores):
        for name in ("local", "bets", "network"):
            selection = explain("store", PROCESSES, backend=name)
            assert selection.chosen is None
            assert "no backend fits (decided by argument)" in str(selection)
