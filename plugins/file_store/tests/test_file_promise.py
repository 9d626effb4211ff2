"""The file promise: what every promise owes, and what is its own: other processes, which may be killed at any step."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dtorch_file_store import promise_packets, promise_server
from dtorch_file_store.promise_errors import RemoteError
from dtorch_file_store.promise_line import Ticket, connect
from dtorch_file_store.wire import INLINE_BYTES, frame

from dtorch_core import (
    BrokenPromiseError,
    DtorchError,
    PeerLostError,
    ProtocolError,
    StoreTimeoutError,
    TensorFuture,
    attach_promise,
    make_promise,
)
from dtorch_core.future import Outcome
from dtorch_core.testing import PromiseTests
from dtorch_core.testing._harness import Background
from dtorch_core.testing._held import Held, left_behind
from dtorch_core.testing._store_base import coded, same
from dtorch_core.testing._store_values import DTYPES, LAYOUTS, of_dtype

WAIT = 30.0
SOON = 2.0
BIG = (4096, 64)  # 1 MiB of float32: in a file, not in the packet

TEMPLATE = """
import os, pickle, socket, sys
import torch
from dtorch_core import attach_promise, make_promise
import dtorch_file_store.promise, dtorch_core.testing._store_values, dtorch_core.testing._promise_ending

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


def with_ticket(token: bytes, **changed: Any) -> bytes:
    ticket = ticket_of(token)._replace(**changed)
    return json.dumps({**json.loads(token), "token": b64encode(json.dumps(ticket).encode()).decode()}).encode()


def maps() -> int:
    """How many promises' files are mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:dtorch-promise")


class TestFilePromise(PromiseTests):
    backend = "file"


class TestChoice:
    def test_promise_for_another_process_is_file(self) -> None:
        promise = make_promise(reach="process")
        assert promise.selection.chosen == "file"
        promise.set_result(None)

    def test_promise_within_this_process_is_memory_where_there_is_memory(self) -> None:
        pytest.importorskip("dtorch_memory_store")
        promise = make_promise()
        assert promise.selection.chosen == "memory"
        assert "memory is better" in str(promise.selection)
        promise.set_result(None)

    def test_promise_that_stays_here_needs_no_thread_no_file_and_no_copy(self) -> None:
        before = Held.now()
        promise = make_promise(reach="process")
        future = promise.future()
        sent = coded(1, BIG)
        promise.set_result(sent)
        assert Held.now() == before
        assert value_of(future).data_ptr() == sent.data_ptr()

    def test_token_that_comes_back_needs_no_copy(self) -> None:
        token, future = handed()
        sent = coded(1, BIG)
        attach_promise(token).set_result(sent)
        assert value_of(future).data_ptr() == sent.data_ptr()


class TestValues(Clean):
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layout_arrives_with_its_values(self, layout: str, worker: Worker) -> None:
        token, future = handed()
        worker.do(
            """
            from dtorch_core.testing._store_values import LAYOUTS
            attach_promise(token).set_result(LAYOUTS[layout]())
            """,
            token=token,
            layout=layout,
        )
        got, wanted = value_of(future), LAYOUTS[layout]()
        assert same(got, wanted)
        assert same(got.clone(), wanted)
        assert got.untyped_storage().nbytes() <= wanted.nbytes

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_dtype_arrives_bit_for_bit(self, dtype: torch.dtype, worker: Worker) -> None:
        token, future = handed()
        worker.do(
            """
            from dtorch_core.testing._store_values import of_dtype
            attach_promise(token).set_result(of_dtype(dtype, "cpu"))
            """,
            token=token,
            dtype=dtype,
        )
        got = value_of(future)
        assert (got.dtype, got.shape) == (dtype, (6,))
        assert torch.equal(got.view(torch.uint8), of_dtype(dtype, "cpu").view(torch.uint8))

    @pytest.mark.parametrize("nbytes", [INLINE_BYTES - 4, INLINE_BYTES, INLINE_BYTES + 4, 4096 * 5, 64 << 20])
    def test_size_does_not_matter(self, nbytes: int, worker: Worker) -> None:
        token, future = handed()
        worker.do("attach_promise(token).set_result(torch.arange(n, dtype=torch.float32))", token=token, n=nbytes // 4)
        got = value_of(future)
        assert torch.equal(got, torch.arange(nbytes // 4, dtype=torch.float32))
        assert got.untyped_storage().nbytes() == nbytes

    @pytest.mark.parametrize(
        ("view", "stored"),
        [
            ("x.t()", 1),
            ("x[:, ::2]", 1 / 2),
            ("x[1:2].expand(4096, 64)", None),
            ("x[:512].expand(3, 512, 64)", 1 / 8),
            ("torch.complex(x, x + 7).conj()", 2),
            ("torch.complex(x, x + 7).conj().imag", 1),
            ("x.as_strided((4000, 65), (64, 1))", None),
        ],
    )
    def test_large_layout_arrives_with_its_values(self, view: str, stored: float | None, worker: Worker) -> None:
        """Each element that it addresses travels once."""
        token, future = handed()
        worker.do(
            f"x = torch.arange({BIG[0] * BIG[1]}.0).reshape({BIG})\nattach_promise(token).set_result({view})",
            token=token,
        )
        x = torch.arange(float(BIG[0] * BIG[1])).reshape(BIG)
        got = value_of(future)
        assert same(got, eval(view, {"x": x, "torch": torch}))
        if stored is not None:
            assert got.untyped_storage().nbytes() == pytest.approx(x.nbytes * stored, rel=0.01)

    def test_mapping_lives_as_long_as_the_value(self, worker: Worker) -> None:
        before = maps()
        token, future = handed()
        worker.do(f"attach_promise(token).set_result(torch.arange({BIG[0] * BIG[1]}.0))", token=token)
        part = value_of(future)[5:8]
        del future
        gc.collect()
        assert maps() == before + 1
        assert part.tolist() == [5.0, 6.0, 7.0]
        part[0] = 1.0  # the memory is this process's alone
        del part
        gc.collect()
        assert maps() == before

    def test_value_outlives_the_process_that_set_it(self, victim: Worker) -> None:
        token, future = handed()
        victim.do(f"attach_promise(token).set_result(torch.arange({BIG[0] * BIG[1]}.0))", token=token)
        victim.kill()
        assert torch.equal(value_of(future), torch.arange(float(BIG[0] * BIG[1])))

    def test_nothing_arrives_as_none(self, worker: Worker) -> None:
        token, future = handed()
        worker.do("attach_promise(token).set_result(None)", token=token)
        assert future.result(WAIT) is None

    def test_value_for_which_there_is_no_memory_is_refused(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The holder still has the right to set, and tells what went wrong."""
        token = worker.do("p = make_promise(reach='process'); f = p.future(); answer = p.serialize()")
        promise = attach_promise(token)
        monkeypatch.setattr(promise_packets, "why_not", lambda nbytes: "this machine has 3 bytes left")
        with pytest.raises(MemoryError, match=r"promise .*1 MiB: this machine has 3 bytes left"):
            promise.set_result(coded(1, BIG))

        promise.set_exception(ValueError("no memory"))
        assert worker.do("answer = str(f.exception(30)); del p, f") == "no memory"


class TestErrors(Clean):
    def raised(self, worker: Worker, code: str) -> BaseException:
        token, future = handed()
        worker.do(f"promise = attach_promise(token)\n{textwrap.dedent(code)}", token=token)
        error = future.exception(WAIT)
        assert error is not None
        return error

    def test_error_keeps_its_type_and_traceback(self, worker: Worker) -> None:
        error = self.raised(
            worker,
            """
            def fails():
                raise FileNotFoundError(2, "on purpose", "a.txt")
            try:
                fails()
            except OSError as raised:
                promise.set_exception(raised)
            """,
        )
        assert type(error) is FileNotFoundError and error.filename == "a.txt"
        (note,) = error.__notes__
        assert f"In pid {worker.pid}:" in note and "in fails" in note

    def test_error_that_was_never_raised_has_no_traceback(self, worker: Worker) -> None:
        error = self.raised(worker, "promise.set_exception(KeyError('k'))")
        assert (type(error), error.args, hasattr(error, "__notes__")) == (KeyError, ("k",), False)

    @pytest.mark.parametrize(
        "code",
        [
            pytest.param("class Own(ValueError): pass\nerror = Own('text 7')", id="type of a script"),
            pytest.param("error = ValueError('text 7'); error.held = open('/dev/null')", id="holds what can't travel"),
            pytest.param(
                "from dtorch_core.testing._promise_ending import OddError\n"
                "class Own(OddError):\n    def __reduce__(self): raise ZeroDivisionError\n"
                "error = Own('text 7')",
                id="refuses to be pickled",
            ),
            pytest.param(
                "class Own(ValueError):\n    def __reduce__(self): return (int, ('no number',))\nerror = Own('text 7')",
                id="refuses to be made again",
            ),
            pytest.param(
                "class Own(ValueError):\n    def __reduce__(self): return (int, ('7',))\nerror = Own('text 7')",
                id="becomes something else",
            ),
        ],
    )
    def test_error_that_cant_travel_is_told_in_words(self, code: str, worker: Worker) -> None:
        error = self.raised(
            worker,
            f"""
{code}
try:
    raise error
except Exception as raised:
    promise.set_exception(raised)
error.held = None
del error
""",
        )
        assert type(error) is RemoteError
        assert "text 7" in str(error) and f"pid {worker.pid}" in str(error)
        assert error.type_name in ("__main__.Own", "ValueError") and error.type_name in str(error)
        assert "raise error" in error.__notes__[0] or "Traceback" in error.__notes__[0]

    def test_error_of_any_length(self, worker: Worker) -> None:
        error = self.raised(worker, "promise.set_exception(ValueError('x' * 3_000_000))")
        assert type(error) is ValueError and len(str(error)) == 3_000_000

    @pytest.mark.parametrize("name", ["KeyboardInterrupt", "SystemExit"])
    def test_error_that_would_end_a_thread(self, name: str, worker: Worker) -> None:
        assert type(self.raised(worker, f"promise.set_exception({name}('x'))")).__name__ == name


class TestDeaths(Clean):
    def test_death_before_attaching_leaves_the_token(self, victim: Worker, worker: Worker) -> None:
        token, future = handed()
        victim.do("", token=token)
        victim.kill()
        assert not future.wait(0.05)
        worker.do("attach_promise(token).set_result(torch.arange(3))", token=token)
        assert value_of(future).tolist() == [0, 1, 2]

    def test_death_of_a_holder_breaks_its_promises_alone(self, victim: Worker, worker: Worker) -> None:
        tokens, futures = zip(*[handed() for _ in range(4)], strict=True)
        victim.do("held = [attach_promise(token) for token in tokens]", tokens=tokens[:3])
        worker.do("promise = attach_promise(token)", token=tokens[3])
        os.kill(victim.pid, signal.SIGKILL)
        for future in futures[:3]:
            with pytest.raises(BrokenPromiseError, match=rf"pid {victim.pid}, was killed by signal 9"):
                future.result(SOON)

        assert not futures[3].done()
        worker.do("promise.set_result(torch.arange(3))")
        assert value_of(futures[3]).tolist() == [0, 1, 2]

    @pytest.mark.parametrize("code", ["os._exit(3)", "sys.exit(3)"])
    def test_holder_that_exits_breaks_its_promise(self, code: str, victim: Worker) -> None:
        token, future = handed()
        victim.begin(f"promise = attach_promise(token)\n{code}", token=token)
        with pytest.raises(BrokenPromiseError, match=rf"pid {victim.pid}, exited with status 3"):
            future.result(WAIT)

    def test_death_amid_a_large_value(self, victim: Worker) -> None:
        token, future = handed()
        victim.begin(
            """
            from dtorch_file_store import promise_packets
            class os(type(promise_packets)):
                def __getattr__(self, name): return getattr(sys.modules["os"], name)
                def write(self, fd, data):
                    sys.modules["os"].write(fd, data[:1000])
                    sys.modules["os"].kill(sys.modules["os"].getpid(), 9)
            promise_packets.os = os("os")
            attach_promise(token).set_result(torch.arange(1 << 20))
            """,
            token=token,
        )
        with pytest.raises(BrokenPromiseError, match=rf"pid {victim.pid}, was killed by signal 9"):
            future.result(WAIT)

    def test_death_at_any_moment_gives_all_or_nothing(self, template: Template) -> None:
        for delay in (0.0, 0.002, 0.005, 0.01, 0.03):
            victim = template.worker()
            token, future = handed()
            victim.begin("attach_promise(token).set_result(torch.arange(1 << 21))", token=token)
            select.select([], [], [], delay)
            victim.kill()
            if future.wait(0.1):
                if future.exception(0) is None:
                    assert torch.equal(value_of(future), torch.arange(1 << 21))
                else:
                    assert type(future.exception(0)) is BrokenPromiseError
            else:
                attach_promise(token).set_result(None)  # it was killed before it had attached it
                assert future.result(WAIT) is None

    def test_death_of_the_maker_is_a_cancelled_promise(self, victim: Worker) -> None:
        token = victim.do("p = make_promise(reach='process'); f = p.future(); answer = p.serialize()")
        promise = attach_promise(token)
        assert not promise.cancelled()
        victim.kill()
        assert promise.cancelled()
        promise.set_result(coded(1, BIG))

    def test_death_of_the_maker_before_attaching(self, victim: Worker) -> None:
        token = victim.do("p = make_promise(reach='process'); f = p.future(); answer = p.serialize()")
        victim.kill()
        with pytest.raises(PeerLostError, match=rf"pid {victim.pid}, which made it, is gone"):
            attach_promise(token)

    def test_maker_that_is_stopped_costs_the_timeout(self, victim: Worker) -> None:
        token = victim.do("p = make_promise(reach='process'); f = p.future(); answer = p.serialize()")
        victim.stop()
        with pytest.raises(StoreTimeoutError, match=rf"pid {victim.pid}.* has not answered for 0.2 s"):
            connect(ticket_of(token), 0.2)

        os.kill(victim.pid, signal.SIGCONT)

    def test_dropped_promise_breaks_its_future(self, worker: Worker) -> None:
        token, future = handed()
        worker.do("promise = attach_promise(token); del promise", token=token)
        with pytest.raises(BrokenPromiseError, match=rf"pid {worker.pid} dropped it unset"):
            future.result(SOON)


class TestHandOver(Clean):
    def test_token_is_attached_once(self, worker: Worker, other: Worker) -> None:
        token, future = handed()
        worker.do("promise = attach_promise(token)", token=token)
        with pytest.raises(ProtocolError, match="attached it already"):
            other.do("attach_promise(token)", token=token)

        with pytest.raises(ProtocolError, match="attached it already"):
            attach_promise(token)

        assert not future.done()
        worker.do("promise.set_result(None)")
        assert future.result(WAIT) is None

    def test_token_of_a_promise_that_has_ended(self, worker: Worker, other: Worker) -> None:
        """Also once nothing of the maker's listens any more."""
        token, future = handed()
        worker.do("attach_promise(token).set_result(None)", token=token)
        assert future.result(WAIT) is None
        for thread in threading.enumerate():
            if thread.name == "dtorch promises":
                thread.join(WAIT)

        with pytest.raises(ProtocolError, match=rf"pid {os.getpid()}, .* attached it already"):
            other.do("attach_promise(token)", token=token)

    def test_token_of_another_host_is_refused(self) -> None:
        token, future = handed()
        with pytest.raises(ProtocolError, match="another host"):
            attach_promise(with_ticket(token, host="elsewhere", address="nobody"))

        attach_promise(token).set_result(None)
        assert future.result(WAIT) is None

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_token_is_of_no_use_to_another_user(self, victim: Worker) -> None:
        token, future = handed()
        victim.do(
            "attach_promise(make_promise(backend='file').serialize()).set_result(None); os.setresuid(4711, 4711, 4711)"
        )
        with pytest.raises(ProtocolError, match=r"user with id 0\b"):
            victim.do("attach_promise(token)", token=token)

        # Nor does its maker listen to whoever leaves out the question.
        assert "user with id 0" in victim.do(
            """
            from dtorch_file_store import promise_packets, wire
            sock = promise_packets.new_socket()
            sock.connect("\\0" + address)
            try: sock.send(wire.frame("hello", secret))
            except OSError: pass
            answer = str(promise_packets.parse(promise_packets.receive(sock, 0)[0]))
            """,
            address=ticket_of(token).address,
            secret=ticket_of(token).secret,
        )
        assert not future.done()
        attach_promise(token).set_result(None)

    @pytest.mark.parametrize("way", ["token", "pickle"])
    def test_hand_over_by_a_holder(self, way: str, victim: Worker, other: Worker) -> None:
        """The one in between may end."""
        token, future = handed()
        take = "attach_promise(token)" if way == "token" else "pickle.loads(token)"
        give = "promise.serialize()" if way == "token" else "pickle.dumps(promise)"
        next_token = victim.do(f"promise = attach_promise(token); answer = {give}", token=token)
        victim.kill()
        assert not future.wait(0.05)
        other.do(f"promise = {take}; promise.set_result(torch.arange(3))", token=next_token)
        assert value_of(future).tolist() == [0, 1, 2]

    def test_hand_over_from_process_to_process(self, worker: Worker, other: Worker) -> None:
        token, future = handed()
        for turn in range(20):
            token = (worker, other)[turn % 2].do("answer = attach_promise(token).serialize()", token=token)

        promise = attach_promise(token)  # and back to its maker
        assert not future.done()
        promise.set_result(coded(1, BIG))
        assert same(value_of(future), coded(1, BIG))

    def test_token_is_good_before_its_handing_over_was_read(self) -> None:
        """The next holder connects first; then the one before hands on; then the next one asks."""
        (blocking, first), (token, future) = handed(), handed()
        busy, go_on = threading.Event(), threading.Event()

        def block(_: object) -> None:
            busy.set()
            assert go_on.wait(WAIT)

        first.add_done_callback(block)
        holder = connect(ticket_of(token), WAIT)
        connect(ticket_of(blocking), WAIT).send(frame("void"))
        assert busy.wait(WAIT)
        with promise_packets.new_socket() as sock:
            sock.settimeout(WAIT)
            sock.connect("\0" + ticket_of(token).address)
            assert holder.send(frame("handed over", "a new secret"))
            sock.send(frame("hello", "a new secret"))
            go_on.set()
            assert promise_packets.parse(sock.recv(1000)).kind == "yours"
            sock.send(frame("void"))
            assert future.result(WAIT) is None

    def test_future_stays_with_the_maker(self, worker: Worker) -> None:
        token, future = handed()
        with pytest.raises(ProtocolError, match=rf"its future is in pid {os.getpid()}"):
            worker.do("promise = attach_promise(token); promise.future()", token=token)

        worker.do("promise.set_result(None)")
        assert future.result(WAIT) is None

    def test_stranger_changes_nothing(self, worker: Worker) -> None:
        """What connects and talks nonsense, or nothing, has no right to set."""
        token, future = handed()
        strangers = []
        for packet in (b"\xff" * 100, frame("hello"), frame("value", 1), b"\0" * 8, None):
            sock = promise_packets.new_socket()
            sock.connect("\0" + ticket_of(token).address)
            if packet is not None:
                sock.send(packet)

            strangers.append(sock)

        worker.do("attach_promise(token).set_result(torch.arange(3))", token=token)
        assert value_of(future).tolist() == [0, 1, 2]
        for sock in strangers:
            sock.close()

    def test_holder_that_talks_nonsense_breaks_its_promise(self) -> None:
        for packet in (b"\xff" * 100, frame("odd"), frame("file", ["float32", [9], [1], 36])):
            token, future = handed()
            with promise_packets.new_socket() as sock:
                ticket = ticket_of(token)
                sock.connect("\0" + ticket.address)
                sock.send(frame("hello", ticket.secret))
                assert sock.recv(1000)
                sock.send(packet)
                with pytest.raises(BrokenPromiseError, match=rf"pid {os.getpid()}, sent can't be read"):
                    future.result(WAIT)

    def test_maker_without_a_descriptor_says_so(self, victim: Worker) -> None:
        token = victim.do(
            """
            p = make_promise(reach='process'); f = p.future(); answer = p.serialize()
            import resource
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
            full = []
            while len(full) < 200:
                try: full.append(os.dup(0))
                except OSError: break
            """
        )
        for _ in range(3):
            with pytest.raises(ProtocolError, match="Too many open files"):
                attach_promise(token)

        victim.do("for fd in full: os.close(fd)")
        attach_promise(token).set_result(torch.arange(3))
        assert victim.do("answer = f.result(30).tolist()") == [0, 1, 2]


class TestCancel(Clean):
    HEARD = """
    import select
    select.select([promise._line._fd], [], [], 30)
    answer = promise.cancelled()
    """

    def test_cancel_is_told_to_the_holder(self, worker: Worker) -> None:
        token, future = handed()
        assert worker.do("promise = attach_promise(token); answer = promise.cancelled()", token=token) is False
        assert future.cancel()
        assert worker.do(self.HEARD) is True
        worker.do("promise.set_result(torch.arange(3))")
        with pytest.raises(ProtocolError):
            worker.do("promise.set_result(None)")

        assert worker.do("answer = promise.cancelled()") is True
        assert future.cancelled()

    def test_cancel_before_it_is_attached(self, worker: Worker) -> None:
        token, future = handed()
        assert future.cancel()
        assert worker.do("promise = attach_promise(token); answer = promise.cancelled()", token=token) is True
        worker.do("promise.set_result(torch.arange(3))")

    def test_cancel_before_it_is_handed_on(self, worker: Worker, other: Worker) -> None:
        """A holder that comes late finds a promise that nobody waits for."""
        token, future = handed()
        worker.do("promise = attach_promise(token)", token=token)
        assert future.cancel()
        assert worker.do(self.HEARD) is True
        token = worker.do("answer = promise.serialize()")
        for _ in range(3):
            token = other.do(
                "promise = attach_promise(token); assert promise.cancelled(); answer = promise.serialize()", token=token
            )

        promise = attach_promise(token)
        assert promise.cancelled()
        promise.set_result(None)

    def test_cancel_against_handing_on(self, worker: Worker, other: Worker) -> None:
        for _ in range(30):
            token, future = handed()
            worker.do("promise = attach_promise(token)", token=token)
            worker.begin("answer = promise.serialize()")
            assert future.cancel()
            token = worker.end()
            assert (
                other.do(f"promise = attach_promise(token){self.HEARD.replace(chr(10) + '    ', chr(10))}", token=token)
                if ticket_of(token).address
                else other.do("answer = attach_promise(token).cancelled()", token=token)
            )
            other.do("promise = None")

    def test_cancel_against_set_has_one_end(self, worker: Worker) -> None:
        for turn in range(30):
            token, future = handed()
            worker.do("promise = attach_promise(token)", token=token)
            worker.begin("promise.set_result(torch.arange(3) + turn)", turn=turn)
            cancelled = future.cancel()
            worker.end()
            assert future.cancelled() is cancelled
            if not cancelled:
                assert value_of(future).tolist() == [turn, turn + 1, turn + 2]


class TestMany(Clean):
    def test_thousand_promises_leak_nothing(self, worker: Worker) -> None:
        look = """
        import gc; gc.collect()
        answer = [len(os.listdir("/proc/self/" + what)) for what in ("fd", "task")]
        answer.append(open("/proc/self/maps").read().count("dtorch"))
        """

        def turn(number: int) -> None:
            token, future = handed()
            worker.do("attach_promise(token).set_result(torch.arange(n))", token=token, n=3 if number % 10 else 5000)
            assert len(value_of(future)) == (3 if number % 10 else 5000)

        for number in range(20):
            turn(number)

        before, mapped = worker.do(look), maps()
        for number in range(1000):
            turn(number)

        assert worker.do(look) == before
        gc.collect()
        assert maps() == mapped

    def test_many_at_once_do_not_mix(self, worker: Worker, other: Worker) -> None:
        pairs = [handed() for _ in range(200)]
        order = list(range(200))
        random.Random(0).shuffle(order)
        code = """
        import threading
        held = {index: attach_promise(token) for index, token in tokens.items()}
        def run(part):
            for index in part:
                held[index].set_result(torch.arange(index, index + (3 if index % 7 else 9000)))
        threads = [threading.Thread(target=run, args=(list(held)[start::4],)) for start in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        del held
        """
        worker.begin(code, tokens={index: pairs[index][0] for index in order[::2]})
        other.begin(code, tokens={index: pairs[index][0] for index in order[1::2]})
        for index, (_, future) in enumerate(pairs):
            assert torch.equal(value_of(future), torch.arange(index, index + (3 if index % 7 else 9000)))

        worker.end()
        other.end()

    def test_threads_hand_over_and_attach_together(self) -> None:
        """The server comes and goes under them."""

        def run(start: int) -> None:
            for turn in range(50):
                token, future = handed()
                if turn % 2:
                    attach_promise(token).set_result(torch.arange(3) + start)
                else:
                    line = connect(ticket_of(token), WAIT)
                    line.send(*promise_packets.pack("test", Outcome(torch.arange(3) + start)))

                assert value_of(future).tolist() == [start, start + 1, start + 2]

        running = [Background(partial(run, start)) for start in range(4)]
        for background in running:
            background.result(WAIT)

    def test_await_from_two_loops(self, worker: Worker) -> None:
        token, future = handed()
        begun = threading.Barrier(3)

        async def main() -> list[int]:
            begun.wait(WAIT)
            got = await asyncio.wait_for(future, WAIT)
            assert got is not None
            return got.tolist()

        running = [Background(lambda: asyncio.run(main())) for _ in range(2)]
        begun.wait(WAIT)
        worker.do("attach_promise(token).set_result(torch.arange(3))", token=token)
        assert [background.result(WAIT) for background in running] == [[0, 1, 2]] * 2

    def test_callback_that_ends_its_thread_hurts_no_other(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reported: list[object] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))

        def leave(_: object) -> None:
            raise SystemExit("on purpose")

        (first, failing), (second, future) = handed(), handed()
        failing.add_done_callback(leave)
        worker.do("for token in tokens: attach_promise(token).set_result(None)", tokens=[first, second])
        assert failing.result(WAIT) is None and future.result(WAIT) is None
        assert reported == [SystemExit]

    def test_callback_may_hand_over_the_next(self, worker: Worker) -> None:
        """In the thread that serves."""
        token, future = handed()
        following: list[tuple[bytes, TensorFuture]] = []
        ready = threading.Event()

        def more(_: object) -> None:
            following.append(handed())
            ready.set()

        future.add_done_callback(more)
        worker.do("attach_promise(token).set_result(None)", token=token)
        assert ready.wait(WAIT)
        worker.do("attach_promise(token).set_result(torch.arange(3))", token=following[0][0])
        assert value_of(following[0][1]).tolist() == [0, 1, 2]


class TestFork(Clean):
    def test_fork_of_the_maker(self, worker: Worker) -> None:
        """The child's copies are refused, its own promises work, and the parent's stay whole."""
        assert worker.do(
            """
            from dtorch_core import ProtocolError
            promise, out = make_promise(reach="process"), make_promise(reach="process")
            future, other = promise.future(), out.future()
            token = out.serialize()
            child = os.fork()
            if child == 0:
                refused = 0
                for call in (lambda: promise.set_result(None), promise.serialize):
                    try: call()
                    except ProtocolError as error: refused += str(os.getpid()) in str(error)
                del promise
                attach_promise(token).set_result(torch.arange(3))  # the child is another process
                own = make_promise(reach="process")
                mine = own.future()
                attach_promise(own.serialize()).set_result(torch.arange(2))
                os._exit(refused + 10 * (mine.result(10).tolist() == [0, 1]))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            promise.set_result(torch.arange(4))
            answer = code, future.result(10).tolist(), other.result(10).tolist()
            del promise, out, future, other
            """
        ) == (12, [0, 1, 2, 3], [0, 1, 2])

    def test_fork_of_a_holder_does_not_keep_its_promise(self, victim: Worker) -> None:
        token, future = handed()
        child = victim.do(
            """
            from dtorch_core import ProtocolError
            promise = attach_promise(token)
            answer = os.fork()
            if answer == 0:
                try: promise.set_result(None)
                except ProtocolError: pass
                import signal
                signal.pause()
            """,
            token=token,
        )
        try:
            assert not future.wait(0.05)
            os.kill(victim.pid, signal.SIGKILL)
            with pytest.raises(BrokenPromiseError, match=rf"pid {victim.pid}"):
                future.result(SOON)
        finally:
            os.kill(child, signal.SIGKILL)


class TestEnds:
    def run(self, script: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "default", "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        errors = [line for line in done.stderr.splitlines() if "NumPy" not in line and "cpu = _conv" not in line]
        assert (done.returncode, errors) == (0, [])
        return done.stdout.strip()

    def test_interpreter_ends_with_promises_out(self) -> None:
        """Nobody is told, nothing hangs, no word on stderr."""
        assert (
            self.run(
                """
            import threading
            from dtorch_core import attach_promise, make_promise
            from dtorch_file_store.promise_line import connect, Ticket
            promise = make_promise(reach="process")
            future = promise.future()
            future.add_done_callback(lambda _: print("told of it"))
            token = promise.serialize()
            import json, base64
            line = connect(Ticket(*json.loads(base64.b64decode(json.loads(token)["token"]))), 10)
            threading.Thread(target=future.result, daemon=True).start()
            left = make_promise(reach="process").serialize()
            print("the end")
            """
            )
            == "the end"
        )


def test_server_that_fails_breaks_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever."""
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    token, future = handed()
    held, other = handed()
    line = connect(ticket_of(held), WAIT)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(promise_server.Server, "_accept", fail)
    monkeypatch.setattr(promise_server, "receive", fail)
    line.close()
    for each in (future, other):
        with pytest.raises(BrokenPromiseError, match="the thread that serves it failed"):
            each.result(WAIT)

    assert reported == [ZeroDivisionError]
    monkeypatch.undo()
    with pytest.raises(DtorchError):
        attach_promise(token)

    token, future = handed()  # another one serves
    attach_promise(token).set_result(None)
    assert future.result(WAIT) is None
    calls: list[Callable[[], object]] = [future.done]
    assert all(call() for call in calls)
