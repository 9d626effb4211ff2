"""Threads that look before they sleep: the lock alone says who was woken, whatever looking does."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from dtorch_memory_store import looking
from dtorch_memory_store.cores import usable
from dtorch_memory_store.waiting import Waiter

from dtorch_core import _pauses
from dtorch_core.testing import Background

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from memory_ranks import LIMIT, on_ranks

LONG = int(LIMIT * 1e9)
"""Nanoseconds: as long as that."""

needs_look = pytest.mark.skipif(looking.available() is None, reason="look.c was not compiled, or DTORCH_LOOK=0")


class Counted:
    """What looks, and how often it did."""

    def __init__(self, look):
        self.look, self.calls = look, 0

    def __call__(self, *args):
        self.calls += 1
        return self.look(*args)


@pytest.fixture
def cores(monkeypatch):
    """Two cores to look on, whatever this machine has, and nobody else's."""
    monkeypatch.setattr(looking, "_cores", (ctypes.c_int * 1)(2))
    monkeypatch.setattr(looking, "_turns", looking.deque())
    monkeypatch.setattr(looking, "_here", looking._Here())
    monkeypatch.setattr(looking, "_CROWD", LONG)
    yield looking._cores
    assert looking._cores[0] == 2, "a core is kept by nobody"


@pytest.fixture(params=["looks", "sleeps"])
def look(request, cores, monkeypatch):
    """Both ways: as compiled, and without."""
    found = looking.available()
    if request.param == "looks" and found is None:
        pytest.skip("look.c was not compiled, or DTORCH_LOOK=0")

    counted = Counted(found) if request.param == "looks" else None
    monkeypatch.setattr(looking, "_look", counted)
    return counted


def elsewhere(what):
    """What it returns in a thread of its own, which has not waited before."""
    return Background(what).result(LIMIT)


class TestSleep:
    def test_thread_sleeps_until_it_is_woken(self, look):
        for _ in range(200):
            waiter = Waiter(0)
            thread = Background(lambda waiter=waiter: waiter.sleep(LIMIT))
            waiter.wake()
            thread.result(LIMIT)
            assert not waiter.lock.acquire(False)  # the sleeper has taken it

    def test_wake_up_that_came_before_is_not_lost(self, look):
        waiter = Waiter(0)
        waiter.wake()
        start = time.monotonic()
        elsewhere(lambda: waiter.sleep(LIMIT))
        assert time.monotonic() - start < LIMIT / 2

    @pytest.mark.parametrize("timeout", [-1, 0, 1e-7, 20e-6, 300e-6, 0.05])
    def test_sleep_ends_at_its_timeout_and_not_before(self, look, timeout):
        def nap():
            start = time.monotonic()
            Waiter(0).sleep(timeout)
            return time.monotonic() - start

        assert timeout <= elsewhere(nap) < LIMIT / 2

    @pytest.mark.parametrize("timeout", [1e10, sys.float_info.max])
    def test_timeout_may_be_as_long_as_one_likes(self, look, timeout):
        waiter = Waiter(0)
        thread = Background(lambda: waiter.sleep(timeout))
        waiter.wake()
        thread.result(LIMIT)

    def test_wake_up_after_a_timeout_is_still_there(self, look):
        waiter = Waiter(0)
        waiter.sleep(20e-6)
        waiter.wake()
        assert waiter.lock.acquire(False)

    def test_many_threads_wake_each_other(self, look):
        """A ring: each is woken by the one before, far more of them than cores."""
        ranks, rounds = 12, 100
        ring = [[Waiter(rank) for rank in range(ranks)] for _ in range(rounds + 1)]
        seen = []

        def run(rank):
            for turn in range(rounds):
                ring[turn][rank].sleep(LIMIT)
                seen.append((turn, rank))
                last = rank == ranks - 1
                ring[turn + last][(rank + 1) % ranks].wake()

        threads = [Background(lambda rank=rank: run(rank)) for rank in range(ranks)]
        ring[0][0].wake()
        for thread in threads:
            thread.result(LIMIT)

        assert seen == [(turn, rank) for turn in range(rounds) for rank in range(ranks)]


def until(true, otherwise):
    """Return once it is; what looks has nothing to tell."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0)


def begun(waiter):
    """Return once its thread looks."""
    until(lambda: waiter.seat is not None, "it has not begun to look")


@needs_look
class TestLooking:
    def test_long_wait_is_followed_by_one_without_looking(self, cores, monkeypatch):
        look = Counted(looking.available())
        monkeypatch.setattr(looking, "_look", look)

        def run():
            calls = []
            for timeout in (0.05, 0.05, 1e-6):
                before = look.calls
                Waiter(0).sleep(timeout)
                calls.append(look.calls - before)

            return calls

        assert elsewhere(run) == [1, 0, 0]

    def test_short_wait_is_followed_by_one_that_looks(self, cores, monkeypatch):
        look = Counted(looking.available())
        monkeypatch.setattr(looking, "_look", look)
        monkeypatch.setattr(looking, "SHORT", LIMIT)

        def run():
            looking._here.looks = False
            Waiter(0).sleep(1e-6)
            first = look.calls
            Waiter(0).sleep(1e-6)
            return first, look.calls

        assert elsewhere(run) == (0, 1)

    def test_no_thread_looks_where_all_cores_are_taken(self, cores, monkeypatch):
        look = Counted(looking.available())
        monkeypatch.setattr(looking, "_look", look)
        cores[0] = 0
        elsewhere(lambda: Waiter(0).sleep(1e-4))
        assert look.calls == 0
        assert look.look(cores, None, (ctypes.c_int * 2)(), LONG, LONG, LONG) == 0  # nor in between
        assert cores[0] == 0
        cores[0] = 2

    def test_woken_thread_leaves_its_core_while_it_waits_for_its_turn(self, cores, monkeypatch):
        monkeypatch.setattr(looking, "_look", looking.available())
        monkeypatch.setattr(looking, "LOOKING", LONG)
        monkeypatch.setattr(looking, "TURNS", LONG)
        waiter = Waiter(0)
        thread = Background(lambda: waiter.sleep(LIMIT))
        begun(waiter)
        until(lambda: cores[0] == 1, "it has taken no core")
        waiter.wake()
        until(lambda: cores[0] == 2, "it has not left its core")
        assert thread.thread.is_alive()
        looking._give_turn()
        thread.result(LIMIT)

    def test_thread_whose_core_is_taken_by_another_program_looks_no_more_for_a_while(self, cores, monkeypatch):
        """As look.c finds: it offered its core, and had it back late."""
        look = Counted(lambda *args: looking._CROWDED)
        monkeypatch.setattr(looking, "_look", look)
        monkeypatch.setattr(_pauses, "MOST", LIMIT)

        def waits():
            looking._here.looks = True  # however long the last wait was on a busy machine
            Waiter(0).sleep(1e-6)

        def run():
            looking._here.pauses._pause = LIMIT
            for _ in range(3):
                waits()

            first = look.calls
            looking._here.pauses.until = 0.0
            waits()
            return first, look.calls

        assert elsewhere(run) == (1, 2)

    def test_exceptions_amid_waits_keep_no_core(self, cores, monkeypatch):
        """Of a signal's handler, at any moment."""
        monkeypatch.setattr(looking, "_look", looking.available())

        class Alarm(Exception):
            pass

        def ring(*_):
            raise Alarm

        rung, before = 0, signal.signal(signal.SIGALRM, ring)
        end = time.monotonic() + 1
        try:
            while time.monotonic() < end:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 50e-6)
                    for _ in range(20):
                        Waiter(0).sleep(3e-6)
                except Alarm:
                    rung += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

        assert rung > 100

    def test_woken_thread_waits_for_its_turn(self, cores, monkeypatch):
        """It goes on when its waker waits, and not when it is woken: until then the waker has the GIL."""
        monkeypatch.setattr(looking, "_look", looking.available())
        monkeypatch.setattr(looking, "LOOKING", LONG)
        monkeypatch.setattr(looking, "TURNS", LONG)
        order, first, second = [], Waiter(0), Waiter(1)

        def wait():
            first.sleep(LIMIT)
            order.append("woken thread goes on")
            second.wake()

        thread = Background(wait)
        begun(first)
        first.wake()
        time.sleep(0.02)  # lets the GIL go; a thread that waits for its turn does not take it
        order.append("waker waits")
        monkeypatch.setattr(looking, "TURNS", 0)  # of this thread's own look: nobody is left to give it a turn
        second.sleep(LIMIT)
        thread.result(LIMIT)
        assert order == ["waker waits", "woken thread goes on"]

    def test_woken_thread_goes_on_if_its_waker_never_waits(self, cores, monkeypatch):
        monkeypatch.setattr(looking, "_look", looking.available())
        monkeypatch.setattr(looking, "LOOKING", LONG)
        waiter = Waiter(0)
        thread = Background(lambda: waiter.sleep(LIMIT))
        begun(waiter)
        waiter.wake()
        thread.result(LIMIT)
        assert not looking._turns  # nobody's turn is wasted on it

    def test_gil_is_free_while_a_thread_looks(self, cores, monkeypatch):
        monkeypatch.setattr(looking, "_look", looking.available())
        monkeypatch.setattr(looking, "LOOKING", LONG)
        waiter, counted = Waiter(0), 0
        thread = Background(lambda: waiter.sleep(LIMIT))
        start = time.monotonic()
        while time.monotonic() - start < 0.1:
            counted += 1

        waiter.wake()
        thread.result(LIMIT)
        assert counted > 1000  # a thread that is to wait for the GIL gets it every 5 ms

    def test_turn_of_a_thread_that_has_gone_harms_nobody(self, cores, monkeypatch):
        """A seat that is told of a turn which was another wait's: its thread sleeps on."""
        monkeypatch.setattr(looking, "_look", looking.available())
        waiter = Waiter(0)

        def wait():
            looking._turns.append(looking._here.seat)
            waiter.sleep(0.05)
            return waiter.lock.locked()

        assert elsewhere(wait)

    def test_forked_child_has_all_cores(self, monkeypatch):
        monkeypatch.setattr(looking, "_cores", (ctypes.c_int * 1)(-7))
        pid = os.fork()
        if pid == 0:
            os._exit(looking._cores[0] != usable() - 1)

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class TestCores:
    @pytest.mark.parametrize(
        ("files", "most"),
        [
            ({}, 1000),
            ({"cpu.max": "max 100000"}, 1000),
            ({"cpu.max": "70000 100000"}, 1),
            ({"cpu.max": "350000 100000"}, 3),
            ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1000),
            ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
            ({"cpu.max": "nonsense"}, 1000),
        ],
    )
    def test_container_may_have_less_than_the_machine(self, files, most, tmp_path, monkeypatch):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n")

        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(1000))
        assert usable(tmp_path) == most


    def test_thread_that_is_bound_to_a_core_counts_those_of_the_process(self):
        def bound():
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            return usable(Path("/nowhere"))

        assert elsewhere(bound) == len(os.sched_getaffinity(os.getpid()))


class TestBuilt:
    @pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
    def test_look_is_compiled_where_there_is_a_compiler(self, monkeypatch):
        monkeypatch.delenv(looking.VARIABLE, raising=False)
        assert looking.available() is not None

    def test_variable_keeps_threads_from_looking(self):
        program = "from dtorch_memory_store import looking; print(looking._look)"
        environment = {**os.environ, looking.VARIABLE: "0"}
        said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True, timeout=LIMIT)
        assert said.strip() == "None"

    def test_exchange_works_without(self, monkeypatch):
        """As where nothing was compiled."""

        def exchange(store):
            if store.rank == 0:
                store.src_set("k", torch.arange(3), 2)
                store.src_wait_until_get_finished("k")
                return []

            with store.borrow("k") as tensor:
                return tensor.tolist()

        monkeypatch.setattr(looking, "_look", None)
        assert on_ranks(exchange, 3) == [[], [0, 1, 2], [0, 1, 2]]
