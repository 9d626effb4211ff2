"""The group kit is itself tested: each wrong group here has one bug, and the test that should catch it does."""

import time
from pathlib import Path

import pytest
import torch
from dtorch_samedevice_group.group import SameDeviceProcessGroup

import dtorch_core
from dtorch_core import BackendSpec, hookimpl
from dtorch_core.testing import run_kit

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from wrong_groups import ALL, PATIENCE, WRONG, same_device


class Plugin:
    @hookimpl
    def dtorch_register_thread_groups(self):
        kinds = [SameDeviceProcessGroup, *WRONG]
        names = ["right", *(group.__name__ for group in WRONG)]
        return [
            BackendSpec(name, f"{kind.__module__}:{kind.__name__}", same_device, capabilities=ALL)
            for name, kind in zip(names, kinds, strict=True)
        ]


@pytest.fixture(scope="module", autouse=True)
def registered():
    dtorch_core.register(Plugin(), name="wrong groups")
    yield
    dtorch_core.unregister("wrong groups")


class TestWrongGroups:
    @pytest.mark.parametrize("group", WRONG, ids=lambda group: group.__name__)
    def test_bug_is_caught(self, group):
        if group.caught_by.startswith("test_cuda") and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")

        begun = time.monotonic()
        outcomes = run_kit("group", group.__name__, select=[group.caught_by], patience=PATIENCE)
        assert outcomes, f"there is no test {group.caught_by}"
        assert "failed" in {outcome.state for outcome in outcomes}, [outcome.why for outcome in outcomes]
        assert time.monotonic() - begun < 20

    def test_right_group_passes_what_catches_them(self):
        outcomes = run_kit("group", "right", select=[group.caught_by for group in WRONG])
        assert [f"{outcome.test}: {outcome.report}" for outcome in outcomes if outcome.state == "failed"] == []
        ran = {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state == "passed"}
        wanted = {group.caught_by.partition("[")[0] for group in WRONG}
        assert ran >= {test for test in wanted if torch.cuda.is_available() or not test.startswith("test_cuda")}
