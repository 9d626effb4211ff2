"""A promise between processes can be built on the core: the smallest one passes what the kit asks of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

from dtorch_core import refresh
from dtorch_core.testing import DEVICES
from dtorch_core.testing._promise_processes import ProcessTests

BACKEND = '''
"""Promises over a local socket. Each has a thread of the process that made it; an end without a word is a death."""

import os, threading
from multiprocessing.connection import Client, Listener

import torch

from dtorch_core import BackendSpec, BrokenPromiseError, Support, TensorFuture, TensorPromise, hookimpl
from dtorch_core.promise import Outcome


@hookimpl
def dtorch_register_promises():
    return [BackendSpec("socket", "socket_promise:Promises", probe, capabilities={"cpu", "await", "multi_process"})]


def probe(topology):
    return Support.yes(1, "one host") if topology.same_host else Support.no("several hosts")


class Promises:
    def __init__(self, ctx):
        self.ctx = ctx

    def create(self):
        return Near(self.ctx)

    def attach(self, token):
        return Far(self.ctx, token.decode())


class Near(TensorPromise):
    def __init__(self, ctx):
        self.ended = TensorFuture(f"a promise of pid {os.getpid()}")
        super().__init__(ctx, self.ended.label)

    def take_future(self):
        return self.ended

    def cancelled(self):
        return self.ended.cancelled()

    def deliver(self, outcome):
        self.ended.settle(outcome)

    def hand_over(self):
        listener = Listener(family="AF_UNIX")
        threading.Thread(target=listen, args=(listener, self.ended), daemon=True).start()
        return listener.address.encode()


def listen(listener, future):
    with listener, listener.accept() as line:
        pid = "?"
        try:
            pid = line.recv()
            values, shape, error = line.recv()
        except EOFError:
            future.settle(Outcome(error=BrokenPromiseError(f"pid {pid}, which held {future.label}, died")))
        else:
            future.settle(Outcome(None if values is None else torch.tensor(values).reshape(shape), error=error))


class Far(TensorPromise):
    def __init__(self, ctx, address):
        self.line = Client(address)
        self.line.send(os.getpid())
        super().__init__(ctx, f"the promise at {address}")

    def take_future(self):
        raise NotImplementedError

    def cancelled(self):
        return False

    def deliver(self, outcome):
        tensor = outcome.tensor
        values = None if tensor is None else tensor.flatten().tolist()
        self.line.send((values, tensor is not None and tensor.shape, outcome.error))
        self.line.close()

    def hand_over(self):
        raise NotImplementedError
'''


@pytest.fixture(autouse=True, scope="module")
def socket_promise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed distribution, as far as another process can tell: spawn hands down ``sys.path``."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "socket_promise.py").write_text(textwrap.dedent(BACKEND))
    metadata = folder / "socket_promise-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: socket-promise\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[dtorch]\nsocket = socket_promise\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        refresh()
        yield

    refresh()


@pytest.mark.skipif("cpu" not in DEVICES, reason="the backend is for the CPU")
class TestSocketPromise(ProcessTests):
    backend = "socket"
