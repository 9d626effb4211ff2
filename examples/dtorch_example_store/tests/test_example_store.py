from dtorch_core.testing import TensorStoreTests


class TestExampleStore(TensorStoreTests):
    backend = "example"
