"""CUDA values of the file promise: the messages about them, which need no GPU, and the values, which do."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from dtorch_file_store import promise_cuda
from torch import Tensor

from dtorch_core import BrokenPromiseError, DtorchError, TensorFuture, UnsupportedOperationError, make_promise
from dtorch_core.future import Outcome
from dtorch_core.testing._harness import Background
from dtorch_core.testing._held import Held, left_behind

WAIT = 60.0
BIG = 1 << 18  # elements: 1 MiB

HOLDER = """
import pickle, sys, threading
asked, answers = sys.stdin.buffer, sys.stdout.buffer
import torch
from dtorch_core import attach_promise
from dtorch_core.errors import UnsupportedTensorError
from dtorch_core.future import Outcome
from dtorch_file_store import promise_cuda
from dtorch_file_store.cuda.ticket import Ticket
from dtorch_file_store.tensors import Layout

class Ready:
    def __init__(self, is_set):
        self.gate = threading.Event()
        if is_set:
            self.gate.set()
    def synchronize(self):
        assert self.gate.wait(60)

class Gpu:
    shares = True
    def uuid(self, tensor):
        return "ab" * 16
    def offer(self, tensor):
        if not self.shares:
            raise UnsupportedTensorError("an expandable segment")
        return Ticket("somebody", "ab" * 16, 1, "00", 0, Layout.of_view(tensor), False, False)
    def download(self, tensor):
        return tensor.clone()

gpu = Gpu()

def on_fake_gpu():
    promise_cuda.gpu_here = lambda: gpu

def give(promise, tensor, computed=True):
    ready = Ready(computed)
    with promise._use("set_result", "it has been set already"):
        promise.deliver(Outcome(tensor, ready))
    return ready

names = globals()
while True:
    try:
        code, given = pickle.load(asked)
    except EOFError:
        break
    names.update(given, answer=None)
    exec(code, names)
    pickle.dump(names["answer"], answers)
    answers.flush()
"""


class Holder:
    """Another process, which holds promises."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid

    def begin(self, code: str, **given: object) -> None:
        """Run ``code`` there, with these names."""
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps((textwrap.dedent(code), given)))
        self._process.stdin.flush()

    def do(self, code: str, **given: object) -> Any:
        """Run ``code`` there; what it called ``answer``."""
        self.begin(code, **given)
        assert self._process.stdout is not None
        return Background(partial(pickle.load, self._process.stdout)).result(WAIT)

    def close(self) -> int:
        """Let it end; its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        status = self._process.wait(WAIT)
        self._process.stdout.close()
        return status


@pytest.fixture(scope="module")
def shared_holder() -> Iterator[Holder]:
    made = Holder()
    made.do("on_fake_gpu()")
    yield made
    assert made.close() == 0


@pytest.fixture
def holder(shared_holder: Holder) -> Holder:
    shared_holder.do("gpu.shares = True")
    return shared_holder


@pytest.fixture
def victim() -> Iterator[Holder]:
    made = Holder()
    made.do("on_fake_gpu()")
    yield made
    made.close()


@pytest.fixture
def _clean(shared_holder: Holder) -> Iterator[None]:
    before = Held.now()
    yield
    gc.collect()
    left = [line for line in left_behind(before, 5.0) if not line.startswith(("process", "open file pipe"))]
    assert left == []


class FakeGpu:
    """The maker's: it finds the value that its holder has offered, or does not."""

    def __init__(self, found: Tensor | Exception) -> None:
        self.found = found
        self.uploaded: list[str] = []

    def copy_of(self, ticket: object) -> Outcome:
        if isinstance(self.found, Exception):
            raise self.found

        return Outcome(self.found)

    def upload(self, uuid: str, staged: Tensor) -> Outcome:
        self.uploaded.append(uuid)
        return Outcome(staged.clone())


def handed() -> tuple[bytes, TensorFuture]:
    """A token, and the future of its promise."""
    promise = make_promise(reach="process")
    return promise.serialize(), promise.future()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """What this process finds on its GPU."""
    gpu = FakeGpu(torch.arange(float(BIG)))
    monkeypatch.setattr(promise_cuda, "gpu_here", lambda: gpu)
    return gpu


GIVE = "promise = attach_promise(token); ready = give(promise, torch.arange(float(n)))"
ENDED = """
for thread in threading.enumerate():
    if thread.name.startswith("dtorch value"): thread.join(60)
answer = promise.detour, [thread.name for thread in threading.enumerate() if thread.name.startswith("dtorch")]
"""


@pytest.mark.usefixtures("_clean")
class TestMessages:
    """On a GPU that is none."""

    def test_value_that_is_shared_takes_no_detour(self, holder: Holder, found: FakeGpu) -> None:
        token, future = handed()
        holder.do(GIVE, token=token, n=BIG)
        assert future.result(WAIT) is not None
        assert torch.equal(future.result(0), torch.arange(float(BIG)))  # type: ignore[arg-type]
        assert holder.do(ENDED) == ("", [])
        assert found.uploaded == []

    @pytest.mark.parametrize("n", [3, 4096, BIG])
    def test_value_that_cant_be_shared_comes_through_the_host(self, n: int, holder: Holder, found: FakeGpu) -> None:
        holder.do("gpu.shares = False")
        token, future = handed()
        holder.do(GIVE, token=token, n=n)
        assert torch.equal(future.result(WAIT), torch.arange(float(n)))  # type: ignore[arg-type]
        detour, threads = holder.do(ENDED)
        assert detour == (
            "an expandable segment" if n == BIG else f"it has {4 * n} bytes, which cost less in a message"
        )
        assert threads == []
        assert found.uploaded == ["ab" * 16]

    @pytest.mark.parametrize("error", [UnsupportedOperationError("two containers"), RuntimeError("two containers")])
    def test_value_that_cant_be_mapped_comes_through_the_host(
        self, error: Exception, holder: Holder, found: FakeGpu
    ) -> None:
        found.found = error
        token, future = handed()
        holder.do(GIVE, token=token, n=BIG)
        assert torch.equal(future.result(WAIT), torch.arange(float(BIG)))  # type: ignore[arg-type]
        assert holder.do(ENDED) == ("two containers", [])

    def test_value_that_comes_through_the_host_keeps_its_layout(self, holder: Holder, found: FakeGpu) -> None:
        holder.do("gpu.shares = False")
        for view in ("x.t()", "x[:, ::2]", "x[1:2].expand(512, 512)", "x[0, 0]", "x[:0]"):
            token, future = handed()
            holder.do(
                f"promise = attach_promise(token); x = torch.arange({BIG}.0).reshape(512, 512); give(promise, {view})",
                token=token,
            )
            wanted = eval(view, {"x": torch.arange(float(BIG)).reshape(512, 512)})
            assert torch.equal(future.result(WAIT), wanted)  # type: ignore[arg-type]

    def test_set_does_not_wait_for_the_value(self, holder: Holder, found: FakeGpu) -> None:
        """It is offered once it is computed, and not before."""
        token, future = handed()
        holder.do("promise = attach_promise(token); ready = give(promise, torch.arange(3.0), False)", token=token)
        assert not future.wait(0.05)
        holder.do("ready.gate.set()")
        assert future.result(WAIT) is not None

    def test_death_while_the_value_is_computed(self, victim: Holder, found: FakeGpu) -> None:
        token, future = handed()
        victim.do("promise = attach_promise(token); give(promise, torch.arange(3.0), False)", token=token)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(BrokenPromiseError, match=rf"pid {victim.pid}, was killed by signal 9"):
            future.result(WAIT)

    def test_death_before_the_value_is_staged(
        self, victim: Holder, found: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def kill(_: object) -> Outcome:
            os.kill(victim.pid, signal.SIGKILL)
            raise UnsupportedOperationError("two containers")

        monkeypatch.setattr(found, "copy_of", kill)
        victim.do("gpu.download = lambda tensor: threading.Event().wait(60)")
        token, future = handed()
        victim.begin(GIVE, token=token, n=BIG)
        with pytest.raises(BrokenPromiseError, match=rf"pid {victim.pid}, sent can't be used here: it ended"):
            future.result(WAIT)

    def test_holder_that_returns_at_once_brings_its_value(self, victim: Holder, found: FakeGpu) -> None:
        token, future = handed()
        victim.begin(GIVE + "\nthreading.Timer(0.05, ready.gate.set).start()\nsys.exit()", token=token, n=BIG)
        assert torch.equal(future.result(WAIT), torch.arange(float(BIG)))  # type: ignore[arg-type]
        assert victim.close() == 0

    def test_value_that_cant_be_brought_is_an_error(self, holder: Holder, found: FakeGpu) -> None:
        holder.do("gpu.shares = False; kept = gpu.download; gpu.download = lambda tensor: 1 / 0")
        token, future = handed()
        holder.do(GIVE, token=token, n=BIG)
        with pytest.raises(DtorchError, match=rf"can't be brought from pid {holder.pid}: division by zero"):
            future.result(WAIT)

        holder.do("gpu.download = kept")

    def test_device_that_is_not_seen_here_breaks_the_promise(
        self, holder: Holder, found: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unseen(uuid: str, staged: Tensor) -> Outcome:
            raise UnsupportedOperationError(f"this process does not see the device {uuid}")

        monkeypatch.setattr(found, "upload", unseen)
        token, future = handed()
        holder.do(GIVE, token=token, n=3)
        with pytest.raises(BrokenPromiseError, match="does not see the device abab"):
            future.result(WAIT)

    def test_cancel_while_the_value_is_computed(self, holder: Holder, found: FakeGpu) -> None:
        token, future = handed()
        holder.do("promise = attach_promise(token); ready = give(promise, torch.arange(3.0), False)", token=token)
        assert future.cancel()
        holder.do("ready.gate.set()")
        assert holder.do(ENDED)[1] == []
        assert future.cancelled()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestValues:
    """On a GPU."""

    @pytest.fixture
    def real(self) -> Iterator[Holder]:
        made = Holder()
        made.do("torch.zeros(1, device='cuda:0')")
        yield made
        assert made.close() == 0

    def test_value_arrives_on_its_device(self, real: Holder) -> None:
        for n in (3, 4096, BIG, 1 << 24):
            token, future = handed()
            real.do(
                "promise = attach_promise(token); promise.set_result(torch.arange(float(n), device='cuda:0'))",
                token=token,
                n=n,
            )
            got = future.result(WAIT)
            assert got is not None and str(got.device) == "cuda:0"
            assert torch.equal(got.cpu(), torch.arange(float(n)))
            assert real.do(ENDED) == ("" if n > 4096 else f"it has {4 * n} bytes, which cost less in a message", [])

    def test_layout_arrives_with_its_values(self, real: Holder) -> None:
        for view in ("x.t()", "x[:, ::2]", "x[1:2].expand(512, 512)", "torch.complex(x, x + 7).conj()", "x[3, 4]"):
            for big in (True, False):
                size = 512 if big else 8
                token, future = handed()
                real.do(
                    f"x = torch.arange(float(size * size), device='cuda:0').reshape(size, size)\n"
                    f"promise = attach_promise(token); promise.set_result({view.replace('512', 'size')})",
                    token=token,
                    size=size,
                )
                x = torch.arange(float(size * size)).reshape(size, size)
                got = future.result(WAIT)
                assert got is not None and got.is_cuda
                assert torch.equal(got.cpu(), eval(view.replace("512", "size"), {"x": x, "torch": torch, "size": size}))

    def test_value_that_is_written_late(self, real: Holder) -> None:
        """Set before its kernel has run; the holder's memory is taken anew at once."""
        token, future = handed()
        waited = real.do(
            """
            import time
            promise = attach_promise(token)
            tensor = torch.full((n,), -1.0, device="cuda:0")
            wanted = torch.arange(float(n), device="cuda:0")
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000_000)
            tensor.copy_(wanted)
            began = time.monotonic()
            promise.set_result(tensor)
            answer = time.monotonic() - began
            del tensor, wanted
            others = [torch.full((n,), -2.0, device="cuda:0") for _ in range(4)]
            """,
            token=token,
            n=1 << 22,
        )
        assert waited < 0.2
        got = future.result(WAIT)
        assert got is not None and torch.equal(got.cpu(), torch.arange(float(1 << 22)))

    def test_death_with_kernels_pending(self) -> None:
        """What was never computed never arrives."""
        victim = Holder()
        token, future = handed()
        victim.do(
            """
            tensor = torch.full((1 << 20,), -1.0, device="cuda:0").add_(0)  # a kernel's first launch waits for others
            torch.cuda.synchronize()
            for _ in range(10):
                torch.cuda._sleep(2_000_000_000)  # about a second; it counts in 32 bits
            tensor.add_(1)
            promise = attach_promise(token)
            promise.set_result(tensor)
            """,
            token=token,
        )
        assert not future.wait(0.1)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(BrokenPromiseError, match=rf"pid {victim.pid}, was killed by signal 9"):
            future.result(WAIT)

        victim.close()

    def test_values_leave_no_gpu_memory(self, real: Holder) -> None:
        used = []
        for _ in range(12):
            token, future = handed()
            real.do(
                "promise = attach_promise(token); promise.set_result(torch.arange(float(n), device='cuda:0'))",
                token=token,
                n=1 << 22,
            )
            assert future.result(WAIT) is not None
            del future
            for thread in threading.enumerate():
                if thread.name.startswith("dtorch") and thread is not threading.current_thread():
                    thread.join(WAIT)

            used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

        assert used[4:] == used[4:5] * 8
