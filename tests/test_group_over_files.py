"""The group of ranks that share a device, on the store between processes: the contract of every group.

Each rank has a node of its own, so that every word goes over a socket, though the ranks are threads of this process.
"""

import pytest

from dtorch_core import use_backend
from dtorch_core.testing import ThreadGroupTests


class TestGroupOverFiles(ThreadGroupTests):
    backend = "samedevice"
    thorough = True

    @pytest.fixture(autouse=True)
    def nodes(self, monkeypatch, request):
        device = request.node.callspec.params.get("device", "cpu") if hasattr(request.node, "callspec") else "cpu"
        if device != "cpu" or "cuda" in getattr(request.function, "capabilities", ()):
            pytest.skip("a process can't map its own memory of a GPU: test_file_cuda.py has a way round that")

        monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))
        with use_backend(store="file"):
            yield
