"""Processes of ranks that do what they are told and may be killed. Imported by the tests that do so."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

LIMIT = 20.0
"""Seconds that no answer takes."""

LATEST = 1.0
"""Seconds in which each survivor learns of a death, also on a busy machine."""

LATENCIES = []
"""Seconds that they took, in all files of tests."""

PROGRAM = Path(__file__).with_name("file_rank_program.py")


class Process:
    """A rank's process, and the line by which it is told what to do."""

    def __init__(self, line):
        self._line = line
        self._answers = line.makefile("r")
        self.busy = self.opened = False
        self.pid = self.answer()["pid"]

    def tell(self, name, *given):
        """Let it begin; :meth:`answer` comes when it has ended."""
        self.busy = True
        self.opened = (self.opened or name == "open") and name != "close"
        self._line.sendall(json.dumps([name, *given]).encode() + b"\n")

    def answer(self, timeout=LIMIT):
        self._line.settimeout(timeout)
        answer = self._answers.readline()
        assert answer, "the process has ended"
        self.busy = False
        return json.loads(answer)

    def do(self, name, *given):
        """What it answers, which is not an error."""
        self.tell(name, *given)
        return self.value()

    def value(self):
        answer = self.answer()
        assert "error" not in answer, answer["trace"]
        return answer.get("value")

    def fails(self, name, *given):
        """The error with which it answers."""
        self.tell(name, *given)
        answer = self.answer()
        assert "error" in answer, f"{name}{given} did not fail"
        return answer

    def waits(self, name, *given):
        """Let it begin, and return when it seems to be blocked. (A wrong guess makes a test weaker, never wrong.)"""
        self.tell(name, *given)
        status, before, deadline = Path(f"/proc/{self.pid}/task/{self.pid}/status"), "", time.monotonic() + 2.0
        while time.monotonic() < deadline:
            now = "".join(line for line in status.read_text().splitlines() if line.startswith(("State", "vol", "nonv")))
            if now == before and "sleeping" in now:
                return

            before = now
            time.sleep(0.003)

    def signal(self, number):
        """Send it a signal; when that was."""
        at = time.monotonic()
        os.kill(self.pid, number)
        return at

    def ended(self):
        """Return when it has, by itself."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.pid)
            try:
                assert select.select([pidfd], [], [], LIMIT)[0]
            finally:
                os.close(pidfd)

    def close(self):
        self._answers.close()
        self._line.close()


class Ranks:
    """Processes of ranks, replaced where they have died; each has its number in every opening."""

    def __init__(self, sessions):
        self.sessions = sessions
        os.mkdir(sessions, 0o700)
        here, there = socket.socketpair()
        environment = {**os.environ, "DTORCH_SESSION_DIR": sessions}
        with there:
            arguments = [sys.executable, str(PROGRAM), str(there.fileno())]
            self._server = subprocess.Popen(arguments, pass_fds=[there.fileno()], env=environment)

        self._place = here
        self._processes = []
        here.settimeout(6 * LIMIT)
        assert here.recv(1) == b"!"
        self.rendezvous = ""
        self._tests = 0

    def start(self):
        here, there = socket.socketpair()
        with there:
            socket.send_fds(self._place, [b"+"], [there.fileno()])

        return Process(here)

    def replace(self, rank):
        """Another process, in place of one that is dead or of no use any more."""
        with contextlib.suppress(ProcessLookupError):
            self._processes[rank].signal(signal.SIGKILL)

        self._processes[rank].close()
        self._processes[rank] = self.start()

    def opened(self, world_size, kind="store", timeout=LIMIT, rendezvous=None):
        """The processes of so many ranks, which have opened it together."""
        while len(self._processes) < world_size:
            self._processes.append(self.start())

        processes = self._processes[:world_size]
        for rank, process in enumerate(processes):
            process.tell("open", rank, world_size, rendezvous or self.rendezvous, kind, "kill", timeout)

        for process in processes:
            process.value()

        return processes

    def idle(self, world_size):
        """Processes that have nothing open, as many as that."""
        while len(self._processes) < world_size:
            self._processes.append(self.start())

        return self._processes[:world_size]

    def begin_test(self):
        """Ranks meet at a file of the test's own: it grows with each opening, and is read from its beginning."""
        self._tests += 1
        self.rendezvous = f"file://{self.sessions}.{self._tests}"

    def end_test(self):
        """Processes that are busy, or have something open still, are of no use to the next test."""
        for rank, process in enumerate(self._processes):
            if process.busy or process.opened:
                self.replace(rank)

        left = os.listdir(self.sessions)
        for name in left:
            shutil.rmtree(os.path.join(self.sessions, name))

        assert left == []

    def close(self):
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGKILL)

            process.close()

        self._place.close()
        try:
            self._server.wait(LIMIT)
        finally:
            self._server.kill()
            self._server.wait()


@pytest.fixture(scope="module")
def pool():
    with tempfile.TemporaryDirectory(prefix="dt") as folder:
        ranks = Ranks(os.path.join(folder, "sessions"))
        try:
            yield ranks
        finally:
            ranks.close()


@pytest.fixture
def ranks(pool):
    """The pool; afterwards nothing is left of the test's sessions, and a new one of the same name works."""
    pool.begin_test()
    yield pool
    pool.end_test()


class Row:
    """Ranks in a session, one of which is killed; the others' waits have begun."""

    def __init__(self, ranks, world_size, victim, kind="store", rendezvous=None):
        self.ranks, self.victim, self.world_size, self.kind = ranks, victim, world_size, kind
        processes = ranks.opened(world_size, kind, rendezvous=rendezvous)
        self.processes = processes
        self.survivors = {rank: process for rank, process in enumerate(processes) if rank != victim}
        self.dead = processes[victim]

    def kill(self):
        """Kill it; every survivor, all of which wait, learns it."""
        at = self.dead.signal(signal.SIGKILL)
        for rank, survivor in self.survivors.items():
            answer = survivor.answer()
            self.lost(answer, rank)
            took = answer["at"] - at
            assert took < LATEST
            LATENCIES.append(took)

    def lost(self, answer, rank):
        assert answer.get("error") == "PeerLostError", answer
        assert f"rank {self.victim} (pid {self.dead.pid})" in answer["text"], answer["text"]
        assert f"rank {rank}" in answer["text"]

    def end(self):
        """Later waits fail at once, too; after the goodbye nothing is left, and the name is free."""
        for rank, survivor in self.survivors.items():
            if self.kind == "store":
                survivor.do("set", f"later {rank}", 1)
                for call in (("get", "new"), ("wait", f"later {rank}"), ("barrier",), ("reset",)):
                    self.lost(survivor.fails(*call), rank)
            else:
                for call in ("all_reduce", "barrier"):
                    self.lost(survivor.fails("collective", call, 16), rank)

        for survivor in self.survivors.values():
            assert survivor.do("close") < 1.0

        assert os.listdir(self.ranks.sessions) == []
        for survivor in self.survivors.values():
            survivor.do("forget")
            held = survivor.do("held")
            assert not held.get("mapped") and not held.get("/memfd") and not held.get("pidfd"), held

        self.ranks.replace(self.victim)
        again = self.ranks.opened(self.world_size, self.kind)
        for process in again:
            process.tell(*(("barrier",) if self.kind == "store" else ("collective", "all_reduce", 16)))

        for process in again:
            process.value()

        for process in again:
            process.do("close")


PRODUCER, CONSUMER, OTHER = 0, 1, 2
