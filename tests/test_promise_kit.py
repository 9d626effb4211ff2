"""The promise kit catches wrong backends: each with one mistake, each caught by the test that is for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtorch_core import BackendSpec, Support, hookimpl, register, unregister
from dtorch_core.testing import DEVICES, run_kit

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from wrong_promises import CAUGHT_BY, AttachesAgain, Home, Right, UnpicklesTokens


def probe(topology: object) -> Support:
    return Support.yes(1, "the tests want it so") if len(topology) == 1 else Support.no("it is one thread's")


def failed(home: type[Home], *tests: str, patience: float = 1.0) -> set[str]:
    """The kit's ``tests``, or all, that fail on the backend that ``home`` makes."""

    class Plugin:
        @hookimpl
        def dtorch_register_promises(self):
            return [BackendSpec("seeded", f"{__name__}:current", probe, capabilities=frozenset({"cpu", "await"}))]

    globals()["current"] = home
    register(Plugin(), name="seeded")
    try:
        outcomes = run_kit("promise", "seeded", select=tests, patience=patience)
    finally:
        unregister("seeded")

    names = {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state != "skipped"}
    assert names >= set(tests or CAUGHT_BY.values()), "not run"
    return {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state == "failed"}


@pytest.fixture(autouse=True)
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch_core._promise_backends._built", {})


@pytest.mark.skipif("cpu" not in DEVICES, reason="the wrong backends are for the CPU")
class TestKit:
    @pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda wrong: wrong.__name__)
    def test_kit_catches(self, wrong: type[Right]) -> None:
        home = type("Wrong", (Home,), {"promise_type": wrong})
        assert failed(home, CAUGHT_BY[wrong]) == {CAUGHT_BY[wrong]}

    @pytest.mark.parametrize(
        ("home", "test"),
        [
            (AttachesAgain, "test_token_is_attached_once"),
            (UnpicklesTokens, "test_token_that_is_none_is_refused"),
        ],
    )
    def test_kit_catches_wrong_tokens(self, home: type[Home], test: str) -> None:
        assert failed(home, test) == {test}

    def test_kit_passes_what_is_right(self) -> None:
        """The same tests, and all others, on the backend without the mistakes; but its slot keeps its future."""
        assert failed(Home, patience=20.0) == {"test_value_is_let_go_with_its_future"}
