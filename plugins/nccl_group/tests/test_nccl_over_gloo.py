"""The group without a GPU: torch's Gloo in NCCL's place, at the one module that knows NCCL. Ranks are threads."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from dtorch_nccl_group import group as factory

import dtorch_core
from dtorch_core import BackendSpec, Support, hookimpl
from dtorch_core.testing import ThreadGroupTests


def made(store, rank, world_size, timeout, name):
    return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))


GLOO = SimpleNamespace(
    DEVICE_TYPE="cpu",
    KIND=dist.ProcessGroup.BackendType.GLOO,
    QUEUED=False,
    backend=made,
    connect=lambda backend, device, timeout: None,
)


class Plugin:
    @hookimpl
    def dtorch_register_thread_groups(self):
        words = frozenset("cpu uneven p2p self_send split async".split())
        factory_path = "dtorch_nccl_group.group:open_process_group"
        return [BackendSpec("gloo", factory_path, lambda topology: Support.yes(1, "for tests"), capabilities=words)]


@pytest.fixture(scope="module", autouse=True)
def gloo():
    patch = pytest.MonkeyPatch()
    patch.setattr(factory, "nccl", GLOO)
    dtorch_core.register(Plugin(), name="nccl over gloo")
    yield
    dtorch_core.unregister("nccl over gloo")
    patch.undo()


class TestKit(ThreadGroupTests):
    backend = "gloo"

    @pytest.fixture(autouse=True)
    def _contract(self, request):
        """As the kit's, without open files: Gloo's sockets go with the last error that knows the group."""
        self._skip_unless_declared(request.function)
        before = set(threading.enumerate())
        yield
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
            assert not thread.is_alive(), f"the test left behind: {thread.name}"
