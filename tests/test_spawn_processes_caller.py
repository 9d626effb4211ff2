"""spawn over processes: nothing is left where its caller ends; main modules that can't be imported again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import process_runs
    from process_runs import LIMIT, PROMPT

nothing_outlives_a_run = process_runs.nothing_outlives_a_run

SCRIPT = """
import os, sys, time
from dtorch_core import AbortedError, spawn

def tell(ctx):
    try:
        ctx.open_store("s").dest_get("never")
    except AbortedError as error:
        os.write(1, f"{{error}}\\n".encode())

def rank(ctx):
    os.write(1, b"%d\\n" % os.getpid())  # whole: print() may write the end of a line by itself
    {body}

{guard}
    {before}
    spawn(rank, 2, ranks_as="processes")
"""

GUARD = 'if __name__ == "__main__":'


@pytest.fixture
def script(tmp_path):
    """Starts a script that spawns two ranks, which print their pids; it has a process group of its own."""
    started = []

    def start(body="time.sleep(60)", guard=GUARD, before="pass"):
        file = tmp_path / "script.py"
        file.write_text(SCRIPT.format(body=body, guard=guard, before=before))
        command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", str(file)]
        pipe = subprocess.PIPE
        popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        started.append(popen)
        return started[-1]

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

        process.communicate(timeout=LIMIT)


def gone(pids, within=PROMPT):
    """Wait until none of the processes is there; nobody here is their parent."""
    deadline = time.monotonic() + within
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue

        with os.fdopen(fd, closefd=True):
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False

    return True


class TestCaller:
    def test_interrupt_ends_the_ranks(self, script):
        process = script()
        pids = [int(process.stdout.readline()) for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them
        _, stderr = process.communicate(timeout=LIMIT)
        assert gone(pids, 0.0)
        assert stderr.rstrip().endswith("KeyboardInterrupt")
        assert stderr.count("Traceback") == 1

    @pytest.mark.parametrize(
        ("body", "told"), [("tell(ctx)", True), ("time.sleep(60)", False)], ids=["woken", "busy"]
    )
    def test_end_of_the_interpreter_ends_the_ranks_of_a_daemon_thread(self, script, body, told):
        before = """import threading
    called = dict(args=(rank, 2), kwargs={"ranks_as": "processes"}, daemon=True)
    threading.Thread(target=spawn, **called).start()
    sys.stdin.readline()
    sys.exit()"""
        process = script(body, before=before)
        pids = [int(process.stdout.readline()) for _ in range(2)]
        stdout, stderr = process.communicate("\n", timeout=LIMIT)
        assert process.returncode == 0, stderr
        assert gone(pids, 0.0)
        assert stdout.count(f"the interpreter that called spawn() (pid {process.pid}) ends\n") == 2 * told

    @pytest.mark.parametrize("before", ["pass", "os.fork() or time.sleep(5)"], ids=["alone", "with a fork"])
    def test_death_of_the_caller_ends_the_ranks(self, script, before):
        process = script(before=before)
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        assert gone(pids)

    def test_main_module_without_a_guard_is_told_so(self, script):
        process = script(guard="if True:")
        stdout, stderr = process.communicate(timeout=LIMIT)
        assert process.returncode == 1
        assert stdout == ""
        last = stderr.rstrip().splitlines()[-1]
        assert "RankFailedError: rank 0 of 2 (pid " in last or "RankFailedError: rank 1 of 2 (pid " in last
        assert "before it began: the main module calls spawn() while it is imported" in last
        assert "Put the call under if __name__ == '__main__':" in last
        assert stderr.count("Traceback") == 1

    def test_function_that_is_defined_under_the_guard_is_told_so(self, script):
        process = script(before="""def rank(ctx): pass
    rank.__qualname__ = rank.__name__ = "guarded"
    guarded = rank""")
        _, stderr = process.communicate(timeout=LIMIT)
        assert process.returncode == 1
        assert "TypeError: spawn: a process of its own does not find what the ranks do: Can't get attribute" in stderr
        assert "outside of if __name__ == '__main__':, or use ranks_as='threads'" in stderr

    def test_main_module_that_can_not_be_imported_again(self, script):
        process = script(guard="if __name__ != '__main__': sys.exit(7)\nelse:")
        _, stderr = process.communicate(timeout=LIMIT)
        assert "ended with exit status 7 before it began: the new interpreter could not import the main" in stderr
