from dtorch_core.testing import ThreadGroupTests


class TestExampleGroup(ThreadGroupTests):
    backend = "example"
