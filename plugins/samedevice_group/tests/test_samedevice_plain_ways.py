"""The contract of every group, with each shortcut turned off in its turn: none of it is the shortcut's."""

import pytest
from dtorch_samedevice_group import blocks
from dtorch_samedevice_group.fused_launch import launcher
from dtorch_samedevice_group.repeats import Repeats

from dtorch_core.testing import DEVICES, ThreadGroupTests

NEVER = 2**62


class TestWithoutRepeats(ThreadGroupTests):
    """Every call is planned."""

    backend = "samedevice"

    @pytest.fixture(autouse=True)
    def _off(self, monkeypatch):
        monkeypatch.setattr(Repeats, "learn", lambda *args: None)


@pytest.mark.skipif("cpu" not in DEVICES, reason="blocks are for the CPU")
class TestWithoutBlocks(ThreadGroupTests):
    """The last rank to come does all the work."""

    backend = "samedevice"

    @pytest.fixture(autouse=True)
    def _off(self, monkeypatch):
        monkeypatch.setattr(blocks, "ALONE_BYTES", NEVER)


@pytest.mark.skipif(DEVICES == ("cpu",), reason="fused kernels are for a GPU")
class TestWithoutFusedKernels(ThreadGroupTests):
    """Torch's kernels do the work."""

    backend = "samedevice"

    @pytest.fixture(autouse=True)
    def _off(self, monkeypatch):
        monkeypatch.setattr(launcher, "usable", False)
