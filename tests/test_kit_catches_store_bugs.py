"""The store kit is itself tested: each wrong store here has one bug, and the test that should catch it does."""

import time
from pathlib import Path

import pytest
import torch

import dtorch_core
from dtorch_core.testing import run_kit
from dtorch_core.testing._harness import DEVICES

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import wrong_stores
    from wrong_stores import ALL, PATIENCE, WRONG

registered = wrong_stores.registered


class TestWrongStores:
    @pytest.mark.parametrize("store", WRONG, ids=lambda store: store.__name__)
    def test_bug_is_caught(self, store):
        if store.caught_by.startswith("test_cuda") and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")

        begun = time.monotonic()
        picked = {"select": [store.caught_by], "thorough": store.thorough}
        outcomes = run_kit("store", store.__name__, **picked, patience=PATIENCE)
        assert "failed" in {outcome.state for outcome in outcomes}, [outcome.why for outcome in outcomes]
        assert time.monotonic() - begun < 20

    def test_right_store_passes_what_catches_them(self):
        outcomes = run_kit("store", "right", select=[store.caught_by for store in WRONG], thorough=True)
        assert [f"{outcome.test}: {outcome.report}" for outcome in outcomes if outcome.state == "failed"] == []
        ran = {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state == "passed"}
        wanted = {store.caught_by.partition("[")[0] for store in WRONG if store.capabilities == ALL}
        assert ran >= {test for test in wanted if torch.cuda.is_available() or not test.startswith("test_cuda")}


class TestRunKit:
    def test_outcomes_carry_capabilities_and_reasons(self):
        outcomes = run_kit("store", "right", select=["test_memory_from_empty_is_not_copied"], patience=PATIENCE)
        assert {outcome.capabilities for outcome in outcomes} == {frozenset({"zero_copy"})}
        (skipped,) = run_kit("store", "right", select=["test_writable_is_refused_or_honoured"], patience=PATIENCE)
        assert (skipped.state, skipped.why) == ("skipped", "store backend 'right' declares 'zero_copy'")

    def test_failure_names_what_was_left(self):
        test = f"test_handshake_of_a_rank_that_is_alone[{DEVICES[0]}]"
        (failed,) = run_kit("store", "LeavesAFile", select=[test], patience=PATIENCE)
        assert (failed.test, failed.state) == (test, "failed")
        assert "left behind: open file /dev/null" in failed.why

    def test_backend_that_is_not_installed_is_refused(self):
        with pytest.raises(dtorch_core.NoBackendError, match="'nonesuch'"):
            run_kit("store", "nonesuch")

    def test_replaced_test_is_noticed(self):
        from dtorch_core.testing import TensorStoreTests

        class Cheats(TensorStoreTests):
            backend = "right"

            def test_barrier_lets_nobody_through_early(self):
                pass

        with pytest.raises(AssertionError, match="test_barrier_lets_nobody_through_early is replaced"):
            Cheats().test_kit_is_complete()

        class Excuses(TensorStoreTests):
            backend = "right"

            @pytest.mark.xfail(reason="not yet")
            def test_barrier_lets_nobody_through_early(self):
                pass

        Excuses().test_kit_is_complete()
