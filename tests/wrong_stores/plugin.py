"""The plugin that offers the wrong stores, and the right one."""

import contextlib
import os

import pytest
from dtorch_memory_store.store import MemoryTensorStore

import dtorch_core
from dtorch_core import BackendSpec, hookimpl

from .base import ALL, WRONG, within_one_process
from .leftovers import NAMES, OPENED


class Plugin:
    @hookimpl
    def dtorch_register_tensor_stores(self):
        def spec(name, store, probe, capabilities):
            return BackendSpec(name, f"{store.__module__}:{store.__name__}", probe, capabilities=capabilities)

        right = spec("right", MemoryTensorStore, within_one_process, ALL)
        return [right] + [spec(store.__name__, store, store.probe, store.capabilities) for store in WRONG]


@pytest.fixture(scope="module", autouse=True)
def registered():
    dtorch_core.register(Plugin(), name="wrong stores")
    yield
    dtorch_core.unregister("wrong stores")
    for file in OPENED:
        file.close()

    for name in NAMES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
