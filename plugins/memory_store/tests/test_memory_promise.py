"""The memory promise: what every promise owes, and what is its own: no copy, one process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch

from dtorch_core import NoBackendError, ProtocolError, attach_promise, make_promise
from dtorch_core.testing import PromiseTests


def run_python(script: str, *arguments: str) -> str:
    """A script in a process of its own; what it prints. It must end well and without a word on stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.strip()


class TestMemoryPromise(PromiseTests):
    backend = "memory"


class TestOneProcess:
    def test_promise_within_this_process_is_memory(self) -> None:
        promise = make_promise()
        assert promise.selection.chosen == "memory"
        assert "threads of one process" in promise.selection.why
        promise.set_result(None)

    def test_promise_for_another_process_says_what_is_missing(self) -> None:
        with pytest.raises(NoBackendError) as refused:
            make_promise(reach="process", backend="memory")

        assert "2 processes" in str(refused.value)

    def test_value_is_not_copied(self) -> None:
        promise = make_promise()
        future = promise.future()
        sent = torch.arange(12.0).reshape(3, 4)[1:, ::2]
        promise.set_result(sent)
        first, second = future.result(0), future.result(0)
        assert first.data_ptr() == second.data_ptr() == sent.data_ptr()
        assert first.stride() == sent.stride()

    def test_token_that_waits_keeps_the_future(self) -> None:
        """Nobody but the token's finder holds it: a callback is enough of a consumer."""
        called: list[object] = []
        promise = make_promise()
        promise.future().add_done_callback(lambda future: called.append(future.result(0).tolist()))
        token = promise.serialize()
        del promise
        gc.collect()
        attach_promise(token).set_result(torch.arange(3))
        assert called == [[0, 1, 2]]

    def test_hand_over_leaves_nothing_behind(self) -> None:
        promise = make_promise()
        future = promise.future()
        watch = weakref.ref(future)
        worker = attach_promise(promise.serialize())
        worker.set_result(torch.arange(3))
        del future
        gc.collect()
        assert watch() is None, "kept by a promise, or by the table of tokens"

    def test_token_of_another_process_is_refused(self) -> None:
        token = run_python(
            """
            from dtorch_core import make_promise
            promise = make_promise()
            future = promise.future()
            print(promise.serialize().decode())
            """
        )
        with pytest.raises(ProtocolError, match=rf"this is pid {os.getpid()}.*reach='process'"):
            attach_promise(token.encode())

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_fork_is_no_second_holder(self) -> None:
        """The child's copy can't be set or attached, and breaks nothing when it goes."""
        printed = run_python(
            """
            import os
            import torch
            from dtorch_core import ProtocolError, attach_promise, make_promise

            promise, handed = make_promise(), make_promise()
            future, other = promise.future(), handed.future()
            token = handed.serialize()
            child = os.fork()
            if child == 0:
                refused = 0
                for call in (lambda: promise.set_result(None), promise.serialize, lambda: attach_promise(token)):
                    try:
                        call()
                    except ProtocolError as error:
                        refused += str(os.getpid()) in str(error)

                del promise
                own = make_promise()
                future = own.future()
                own.set_result(None)
                os._exit(refused + 10 * (future.result(0) is None))

            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
            assert not future.done()
            promise.set_result(torch.arange(3))
            attach_promise(token).set_result(torch.arange(4))
            print(future.result(0).tolist(), other.result(0).tolist())
            """
        )
        assert printed == "[0, 1, 2] [0, 1, 2, 3]"

    def test_promises_that_are_pending_when_the_interpreter_ends(self) -> None:
        """Held by a module, a cycle, a daemon thread and an await: nobody is told, nothing hangs."""
        assert run_python(
            """
            import asyncio, threading
            from dtorch_core import make_promise

            promise = make_promise()
            future = promise.future()
            future.add_done_callback(lambda future: print("told of it"))
            cycle = [make_promise()]
            cycle.append(cycle)
            pending = cycle[0].future()
            waiting = threading.Event()

            def wait():
                waiting.set()
                pending.result()

            threading.Thread(target=wait, daemon=True).start()
            waiting.wait(10)

            async def main():
                asyncio.ensure_future(future)
                await asyncio.sleep(0)

            asyncio.run(main())
            print("the end")
            """
        ) == "the end"
