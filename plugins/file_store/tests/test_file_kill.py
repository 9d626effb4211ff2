"""Processes that are killed, stopped, forked or fail, at every step: what the others see, and what is left of them."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("dtorch_samedevice_group")

LIMIT = 20.0
"""Seconds that no answer takes."""

PROMPT = 0.1
"""Seconds in which a survivor learns of a death: the median. One by one they have :data:`LATEST`, on a busy machine."""

LATEST = 1.0

NUMEL = 1 << 16
"""Elements of a tensor that is reduced."""

PROGRAM = Path(__file__).with_name("file_rank_program.py")

COLLECTIVES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "send and recv",
]


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
        self.latencies = []
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
            self.ranks.latencies.append(took)

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

STEPS = {
    # when: who is killed, what was done before (rank, command), and what each survivor waits in.
    "producer, after opening": (PRODUCER, [], {CONSUMER: ("get", "k")}),
    "producer, after src_set": (PRODUCER, [(PRODUCER, "set", "k", 1)], {CONSUMER: ("get", "next")}),
    "producer, after dest_get": (
        PRODUCER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k")],
        {CONSUMER: ("barrier",)},
    ),
    "producer, after dest_finish_get": (
        PRODUCER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k"), (CONSUMER, "finish", "k")],
        {CONSUMER: ("get", "k")},
    ),
    "producer, in its wait": (
        PRODUCER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k"), (PRODUCER, "begin", "wait", "k")],
        {CONSUMER: ("get", "next")},
    ),
    "consumer, after opening": (CONSUMER, [(PRODUCER, "set", "k", 1)], {PRODUCER: ("wait", "k")}),
    "consumer, in its wait": (
        CONSUMER,
        [(CONSUMER, "begin", "get", "never"), (PRODUCER, "set", "k", 1)],
        {PRODUCER: ("wait", "k")},
    ),
    "consumer, after dest_get": (
        CONSUMER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k")],
        {PRODUCER: ("wait", "k")},
    ),
    "consumer, after dest_finish_get": (
        CONSUMER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k"), (CONSUMER, "finish", "k"), (PRODUCER, "wait", "k")],
        {PRODUCER: ("barrier",)},
    ),
    "in a barrier": (CONSUMER, [(PRODUCER, "set", "k", 1), (CONSUMER, "begin", "barrier")], {PRODUCER: ("wait", "k")}),
    "in reset": (CONSUMER, [(PRODUCER, "set", "k", 1), (CONSUMER, "begin", "reset")], {PRODUCER: ("wait", "k")}),
    "before reset": (CONSUMER, [], {PRODUCER: ("reset",)}),
}


class TestKill:
    @pytest.mark.parametrize("world_size", [2, 3])
    @pytest.mark.parametrize("step", STEPS)
    def test_survivors_learn_it_at_once_and_nothing_is_left(self, ranks, step, world_size):
        victim, before, waits = STEPS[step]
        row = Row(ranks, world_size, victim)
        for rank, name, *given in before:
            if name == "begin":
                row.processes[rank].waits(*given)
            else:
                row.processes[rank].do(name, *given)

        for rank, survivor in row.survivors.items():
            # The third one waits where it can, without letting the others through.
            other = ("barrier",) if step == "in a barrier" else ("reset",) if step == "in reset" else ("get", "never")
            survivor.waits(*waits.get(rank, other))

        row.kill()
        row.end()

    @pytest.mark.parametrize("scheme", ["file", "tcp"])
    def test_ranks_that_met_at_a_url(self, ranks, scheme):
        with socket.socket() as probe:  # bound and closed: free, and not handed out again soon
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        row = Row(ranks, 2, CONSUMER, rendezvous=ranks.rendezvous if scheme == "file" else f"tcp://127.0.0.1:{port}")
        row.survivors[PRODUCER].waits("get", "k")
        row.kill()
        row.end()

    @pytest.mark.parametrize("collective", COLLECTIVES)
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_inside_a_collective(self, ranks, collective, world_size):
        """All are in it, again and again."""
        row = Row(ranks, world_size, CONSUMER, "group")
        for process in row.processes:
            process.tell("collective", collective, NUMEL, True)

        time.sleep(0.05)  # somewhere in it: each run elsewhere
        row.kill()
        row.end()

    @pytest.mark.parametrize("collective", COLLECTIVES[:-1])
    def test_waiting_in_a_collective(self, ranks, collective):
        """One rank has not come; another one, which waits, dies."""
        row = Row(ranks, 3, CONSUMER, "group")
        for process in row.processes[:2]:
            process.waits("collective", collective, NUMEL)

        row.processes[OTHER].waits("collective", "recv", NUMEL)
        row.kill()
        row.end()


CORE, FILES = "dtorch_core._opening:", "dtorch_file_store.opening:"

OPENING = {
    # when: where it is killed, what the place is called with then, and its rank where not every rank comes there.
    "before it chooses": (CORE + "_agree", None, None),
    "before it says what it chooses": (CORE + "Meeting.exchange", "choice", None),
    "having said half of what it chooses": (CORE + "Meeting._arrive", "choice", None),
    "before it imports the backend": (CORE + "load_factory", None, None),
    "before it listens": (FILES + "SessionDirectory", None, None),
    "before it says that it listens": (CORE + "Meeting.exchange", "built", None),
    "having said half that it listens": (CORE + "Meeting._arrive", "built", None),
    "before it connects": (FILES + "Node", None, None),
    "connecting": (FILES + "_Meeting._connect", None, 2),
    "before it says who it is": (FILES + "frame", "hello", None),
    "before it accepts": (FILES + "_Meeting._accept", None, None),
    "hearing who connects": (FILES + "_Meeting._greets", None, 0),
    "before it reads": (FILES + "Node.connect", None, None),
    "before it says that it is ready": (CORE + "Meeting.exchange", "ready", None),
    "having said half that it is ready": (CORE + "Meeting._arrive", "ready", None),
}


class TestKillWhileOpening:
    def survive(self, ranks, where, first, victim, kind="store", rendezvous=None, timeout=LIMIT):
        """The answers of those that open it with one that is killed on the way, and the seconds from then on."""
        processes = ranks.idle(3)
        for rank, process in enumerate(processes):
            command = ("dies_opening", where, first) if rank == victim else ("open",)
            process.tell(*command, rank, 3, rendezvous or ranks.rendezvous, kind, "kill", timeout)

        at = processes[victim].answer()["at"]
        answers = [process.answer() for rank, process in enumerate(processes) if rank != victim]
        return answers, [answer["at"] - at for answer in answers]

    def nothing_is_left(self, ranks, victim, kind="store"):
        """And the name is free."""
        assert os.listdir(ranks.sessions) == []
        for rank, process in enumerate(ranks.idle(3)):
            if rank != victim:
                process.do("forget")
                held = process.do("held")
                assert not held.get("mapped") and not held.get("/memfd") and not held.get("pidfd"), held
                assert not held.get("socket", 1) > 1 and held["threads"] == 1, held

        ranks.replace(victim)
        for process in ranks.opened(3, kind):
            process.do("close")

    @pytest.mark.parametrize(
        ("step", "victim"),
        [(step, victim) for step, (*_, only) in OPENING.items() for victim in ([0, 2] if only is None else [only])],
    )
    def test_survivors_learn_it_at_once(self, ranks, step, victim):
        where, first, _ = OPENING[step]
        dead = ranks.idle(3)[victim]
        answers, took = self.survive(ranks, where, first, victim)
        for answer in answers:
            assert answer.get("error") == "PeerLostError", answer
            assert f"rank {victim} (pid {dead.pid})" in answer["text"], answer["text"]

        assert max(took) < LATEST
        ranks.latencies += took
        self.nothing_is_left(ranks, victim)

    @pytest.mark.parametrize("step", ["before it imports the backend", "before it listens", "before it reads"])
    def test_opening_a_group(self, ranks, step):
        """The store is part of a larger opening."""
        dead = ranks.idle(3)[1]
        answers, took = self.survive(ranks, *OPENING[step][:2], 1, "group")
        for answer in answers:
            assert answer.get("error") == "PeerLostError", answer
            assert f"rank 1 (pid {dead.pid})" in answer["text"], answer["text"]

        assert max(took) < LATEST
        self.nothing_is_left(ranks, 1, "group")

    @pytest.mark.parametrize("step", ["members", "choice", "ready"])
    def test_splitting_a_group(self, ranks, step):
        """Its ranks know each other: nobody has to be told first who they are."""
        processes = ranks.opened(3, "group")
        for rank, process in enumerate(processes):
            command = ("dies_splitting", "dtorch_core._meeting:Meeting.exchange", step) if rank == 2 else ("split",)
            process.tell(*command, [2, 0, 1])

        at = processes[2].answer()["at"]
        for process in processes[:2]:
            answer = process.answer()
            assert answer.get("error") == "PeerLostError", answer
            assert f"(pid {processes[2].pid})" in answer["text"], answer["text"]
            assert answer["at"] - at < LATEST
            process.do("close")

        self.nothing_is_left(ranks, 2, "group")

    @pytest.mark.parametrize("kind", ["store", "group"])
    def test_rank_that_serves_the_rendezvous(self, ranks, kind):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

        dead = ranks.idle(3)[0]
        answers, took = self.survive(ranks, CORE + "load_factory", None, 0, kind, rendezvous)
        for answer in answers:
            assert answer.get("error") == "PeerLostError", answer
            assert f"rank 0 (pid {dead.pid})" in answer["text"], answer["text"]

        assert max(took) < LATEST
        self.nothing_is_left(ranks, 0, kind)

    @pytest.mark.parametrize("where", [CORE + "Meeting.exchange", CORE + "_meet"])
    def test_rank_of_which_nobody_knows_costs_the_timeout_and_is_named(self, ranks, where):
        answers, took = self.survive(ranks, where, None, 1, timeout=0.4)
        for answer in answers:
            assert answer.get("error") == "StoreTimeoutError", answer
            assert "rank 1 had not come" in answer["text"]

        assert max(took) < 0.4 + LATEST
        self.nothing_is_left(ranks, 1)


class TestEndsOtherwise:
    def test_script_that_raises(self, ranks):
        first, second = ranks.opened(2)
        first.waits("get", "k")
        second.tell("fail")
        answer = first.answer()
        assert answer["error"] == "PeerLostError"
        assert f"rank 1 (pid {second.pid})" in answer["text"]
        first.do("close")
        second.ended()
        ranks.replace(1)

    def test_thread_that_raises(self, ranks):
        first, second = ranks.idle(2)
        first.tell("open", 0, 2, ranks.rendezvous)
        second.tell("fail_in_thread", 1, 2, ranks.rendezvous)
        first.value()
        answer = first.fails("get", "k")
        assert answer["error"] == "PeerLostError"
        assert f"rank 1 (pid {second.pid}) was lost" in answer["text"]
        assert "KeyError" in answer["text"]
        second.value()
        second.do("close")
        first.do("close")

    def test_goodbye_is_no_death(self, ranks):
        first, second, third = ranks.opened(3)
        first.do("set", "k", 1)
        second.do("close")
        third.do("get", "k")
        third.do("finish", "k")
        first.do("wait", "k")
        first.do("close")
        third.do("close")


class TestStopped:
    def test_costs_the_timeout_and_no_more(self, ranks):
        first, second, third = ranks.opened(3)
        first.do("set", "k", 1)
        second.signal(signal.SIGSTOP)
        for call in (("wait", "k"), ("get", "other"), ("barrier",), ("reset",)):
            begun = time.monotonic()
            answer = first.fails(*call, 0.3)
            assert answer["error"] == "StoreTimeoutError"
            assert 0.3 <= answer["at"] - begun < 0.3 + LATEST

        third.do("set", "other", 1)  # the others go on
        first.do("get", "other")
        first.do("finish", "other")
        third.do("wait", "other")
        second.signal(signal.SIGCONT)
        second.do("get", "k")
        second.do("finish", "k")
        first.do("wait", "k")
        for process in (first, second, third):
            process.tell("barrier")

        for process in (first, second, third):
            process.value()

        for process in (first, second, third):
            process.do("close")

    def test_peer_that_does_not_read_blocks_nobody(self, ranks):
        """More than the sockets hold is under way; it all arrives once the peer reads."""
        count, numel = 1000, 2000
        first, second = ranks.opened(2)
        second.signal(signal.SIGSTOP)
        assert first.do("set_many", count, numel) < LATEST
        first.tell("wait_many", count)
        second.signal(signal.SIGCONT)
        second.do("get_many", count, numel)
        first.value()
        first.do("close")
        second.do("close")

    def test_goodbye_waits_a_second_for_a_peer_that_does_not_read(self, ranks):
        first, second = ranks.opened(2)
        second.signal(signal.SIGSTOP)
        first.do("set_many", 1000, 2000)
        assert 0.5 < first.do("close") < 2.0
        second.signal(signal.SIGCONT)
        assert second.fails("get", "k")["error"] == "PeerLostError"
        second.do("close")

    def test_goodbye_to_a_peer_that_is_stopped_is_said_at_once(self, ranks):
        first, second = ranks.opened(2)
        second.signal(signal.SIGSTOP)
        assert first.do("close") < 0.5
        second.signal(signal.SIGCONT)
        answer = second.fails("get", "k")
        assert answer["error"] == "PeerLostError"
        assert "rank 0" in answer["text"]
        second.do("close")

    def test_death_is_seen_beside_a_stopped_rank(self, ranks):
        row = Row(ranks, 3, CONSUMER)
        stopped = row.survivors.pop(OTHER)
        row.survivors[PRODUCER].waits("get", "k")
        stopped.signal(signal.SIGSTOP)
        row.kill()
        stopped.signal(signal.SIGCONT)
        row.lost(stopped.fails("get", "k"), OTHER)
        row.survivors[OTHER] = stopped
        row.end()

    def test_stopped_rank_that_is_killed(self, ranks):
        row = Row(ranks, 2, CONSUMER)
        row.survivors[PRODUCER].waits("get", "k")
        row.dead.signal(signal.SIGSTOP)
        row.kill()
        row.end()


class TestFork:
    def test_child_is_refused_and_the_parent_goes_on(self, ranks):
        first, second = ranks.opened(2)
        first.do("set", "k", 1)
        child, answers = first.do("fork")
        try:
            refused = {name: said for name, said in answers.items() if name not in ("close",)}
            for name, said in refused.items():
                assert said.startswith("ProtocolError"), (name, said)
                assert f"opened in pid {first.pid}" in said and f"this is pid {child}" in said

            assert answers["close"] == "done"
            second.do("get", "k")
            second.do("finish", "k")
            first.do("wait", "k")
            first.tell("barrier")
            second.do("barrier")
            first.value()
            first.do("close")
            second.do("close")
        finally:
            os.kill(child, signal.SIGKILL)

    def test_death_is_seen_though_a_forked_child_lives(self, ranks):
        row = Row(ranks, 2, CONSUMER)
        child, _ = row.dead.do("fork")
        try:
            row.survivors[PRODUCER].waits("get", "k")
            row.kill()
            row.end()
        finally:
            os.kill(child, signal.SIGKILL)


class TestDirectory:
    def test_dead_session_does_not_disturb(self, ranks):
        """All of its processes were killed; the next one of the same name works, and the dead one is gone."""
        first, second = ranks.opened(2)
        for process in (first, second):
            process.signal(signal.SIGKILL)

        ranks.replace(0)
        ranks.replace(1)
        (dead,) = os.listdir(ranks.sessions)
        for process in ranks.opened(2):
            process.tell("barrier")

        for process in ranks.idle(2):
            process.value()

        (alive,) = os.listdir(ranks.sessions)
        assert alive != dead

        for process in ranks.idle(2):
            process.do("close")

        assert os.listdir(ranks.sessions) == []

    def test_descriptors_and_mappings_after_many_sessions(self, ranks):
        for process in ranks.opened(2):
            process.do("close")

        before = [process.do("held") for process in ranks.idle(2)]
        for _ in range(5):
            first, second = ranks.opened(2)
            first.do("set", "k", 1)
            second.do("get", "k")
            second.do("finish", "k")
            first.do("wait", "k")
            first.do("close")
            second.do("close")

        for process, held in zip(ranks.idle(2), before, strict=True):
            process.do("forget")
            assert process.do("held") == held


def test_median_of_what_survivors_took(pool):
    """Over all rows that ran before."""
    if not pool.latencies:
        pytest.skip("no row has run")

    median = statistics.median(pool.latencies)
    print(f"{len(pool.latencies)} waits: median {1e3 * median:.1f} ms, worst {1e3 * max(pool.latencies):.1f} ms")
    assert median < PROMPT
