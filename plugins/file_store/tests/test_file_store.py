"""The file store: the contract of every store, and what is this one's own."""

import pytest

from dtorch_core.testing import TensorStoreTests

SESSION = "dtorch_file_store.opening.homes_of"


class TestOneNode(TensorStoreTests):
    """All ranks are threads of one process."""

    backend = "file"


class TestNodeEach(TensorStoreTests):
    """Each rank is a node: whatever it says goes over a socket, though its peer is a thread beside it."""

    backend = "file"

    @pytest.fixture(autouse=True)
    def nodes(self, monkeypatch):
        monkeypatch.setattr(SESSION, lambda topology: list(range(len(topology))))


class TestTwoRanksPerNode(TensorStoreTests):
    """As ``threads_per_process=2`` would be."""

    backend = "file"

    @pytest.fixture(autouse=True)
    def nodes(self, monkeypatch):
        monkeypatch.setattr(SESSION, lambda topology: [rank // 2 for rank in range(len(topology))])
