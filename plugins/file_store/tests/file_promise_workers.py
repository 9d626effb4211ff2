"""Other processes that attach promises, for the tests of what becomes of those."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
from base64 import b64decode
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dtorch_file_store.promise_line import Ticket

from dtorch_core import TensorFuture, make_promise
from dtorch_core.testing._harness import Background
from dtorch_core.testing._held import Held, left_behind

WAIT = 30.0

BIG = (4096, 64)  # 1 MiB of float32: in a file, not in the packet

TEMPLATE = """
import os, pickle, socket, sys
import torch
from dtorch_core import attach_promise, make_promise
import dtorch_file_store.promise, dtorch_core.testing._layouts, dtorch_core.testing._promise_ending

door = socket.socket(fileno=int(sys.argv[1]))
while True:
    data, fds, _, _ = socket.recv_fds(door, 1, 2)
    if not data:
        sys.exit()
    pid = os.fork()
    if pid == 0:
        break
    for fd in fds:
        os.close(fd)
    door.send(pid.to_bytes(4, "little"))

door.close()
asked, answers = os.fdopen(fds[0], "rb"), os.fdopen(fds[1], "wb")
names = globals()
while True:
    try:
        code, given = pickle.load(asked)
    except EOFError:
        break
    names.update(given, answer=None)
    try:
        exec(code, names)
        reply = names["answer"], None
    except Exception as error:
        reply = None, error
        error.__traceback__ = None
    names.pop("error", None)
    pickle.dump(reply, answers)
    answers.flush()
"""


class Worker:
    """Another process, which does what it is told."""

    def __init__(self, pid: int, asked: int, answers: int) -> None:
        self.pid = pid
        self._asked, self._answers = os.fdopen(asked, "wb"), os.fdopen(answers, "rb")

    def begin(self, code: str, **given: object) -> None:
        """Run ``code`` there, with these names."""
        self._asked.write(pickle.dumps((textwrap.dedent(code), given)))
        self._asked.flush()

    def end(self) -> Any:
        """What it called ``answer``; raises what it raised."""
        answer, error = Background(partial(pickle.load, self._answers)).result(WAIT)
        if error is not None:
            raise error

        return answer

    def do(self, code: str, **given: object) -> Any:
        """Both."""
        self.begin(code, **given)
        return self.end()

    def stop(self) -> None:
        """Stop all its threads; returns when they have."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + WAIT
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def kill(self) -> None:
        """End it at once; its files are closed when this returns. It stays a zombie while the template lives."""
        if not self._answers.closed:
            os.kill(self.pid, signal.SIGKILL)
            self.close()

    def close(self) -> None:
        """Let it end."""
        self._asked.close()
        Background(self._answers.read).result(WAIT)
        self._answers.close()


class Template:
    """A process that has imported all, and of which each worker is a fork: importing takes seconds."""

    def __init__(self) -> None:
        self._door, inner = socket.socketpair()
        with inner:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", TEMPLATE, str(inner.fileno())],
                pass_fds=[inner.fileno()],
                env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # the other check forbids CUDA after a fork
            )

        self._door.settimeout(WAIT)

    def worker(self) -> Worker:
        """A new process."""
        (asked, to), (answers, back) = os.pipe(), os.pipe()
        socket.send_fds(self._door, [b"x"], [asked, back])
        os.close(asked)
        os.close(back)
        return Worker(int.from_bytes(self._door.recv(4), "little"), to, answers)

    def close(self) -> None:
        self._door.close()
        self._process.wait(WAIT)


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    made = Template()
    yield made
    made.close()


@pytest.fixture(scope="module")
def workers(template: Template) -> Iterator[list[Worker]]:
    """Two that all tests share."""
    made = [template.worker(), template.worker()]
    yield made
    for worker in made:
        worker.close()


@pytest.fixture
def victim(template: Template) -> Iterator[Worker]:
    """One that a test may kill."""
    made = template.worker()
    yield made
    made.kill()


@pytest.fixture
def worker(workers: list[Worker]) -> Worker:
    return workers[0]


@pytest.fixture
def other(workers: list[Worker]) -> Worker:
    return workers[1]


class Clean:
    """Nothing is left in this process after any test."""

    @pytest.fixture(autouse=True)
    def _clean(self, workers: list[Worker], request: pytest.FixtureRequest) -> Iterator[None]:
        if "victim" in request.fixturenames:
            request.getfixturevalue("victim")

        before = Held.now()
        yield
        gc.collect()
        assert left_behind(before, 5.0) == []


def handed() -> tuple[bytes, TensorFuture]:
    """A token, and the future of its promise."""
    promise = make_promise(reach="process")
    return promise.serialize(), promise.future()


def value_of(future: TensorFuture) -> torch.Tensor:
    got = future.result(WAIT)
    assert got is not None
    return got


def ticket_of(token: bytes) -> Ticket:
    return Ticket(*json.loads(b64decode(json.loads(token)["token"])))


def maps() -> int:
    """How many promises' files are mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:dtorch-promise")
