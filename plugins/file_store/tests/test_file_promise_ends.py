"""The file promise: processes that are killed, forked or end, at any step, and a server that fails."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dtorch_file_store import promise_server
from dtorch_file_store.promise_line import connect

from dtorch_core import BrokenPromiseError, DtorchError, PeerLostError, StoreTimeoutError, attach_promise
from dtorch_core.testing._store_base import coded

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_promise_workers")
    import file_promise_workers as processes
    from file_promise_workers import BIG, WAIT, Clean, Template, Worker, handed, ticket_of, value_of

# Fixtures.
other = processes.other
template = processes.template
victim = processes.victim
worker = processes.worker
workers = processes.workers

SOON = 2.0


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
