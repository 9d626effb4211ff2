"""spawn over processes: results, how a run ends whatever becomes of a rank or of its process, and what is left."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import popen_spawn_posix, resource_tracker

import pytest
import torch
import torch.distributed as dist

from dtorch_core import (
    DtorchError,
    RankFailedError,
    StoreTimeoutError,
    UnsupportedOperationError,
    refresh,
    spawn,
    use_backend,
)
from dtorch_core._processes import ProcessRun
from dtorch_core.testing import run_ranks
from dtorch_core.testing._held import Held, left_behind

LIMIT = 60.0
"""Seconds that a run may take on a busy machine; most of them are for importing torch."""

PROMPT = 8.0
"""Seconds from a rank's failure to the end of its run on a busy machine, where nobody has to be killed."""

RANKS = '''
import multiprocessing, os, signal, sys, threading, time

import torch

from dtorch_core import AbortedError, PeerLostError, spawn

LIMIT = 60.0


class Meeting:
    """The ranks say and hear that they have come somewhere."""

    def __init__(self, ctx):
        self.ctx, self.store = ctx, ctx._scope.rendezvous.clone()

    def say(self, what):
        self.store.set(f"{what}/{self.ctx.rank}", str(time.monotonic()))

    def hear(self, what, *ranks):
        self.store.wait([f"{what}/{rank}" for rank in ranks])

    def all(self, what):
        self.say(what)
        self.hear(what, *range(self.ctx.world_size))


def who(ctx, *args):
    return ctx.rank, ctx.world_size, ctx.device, threading.current_thread().name, os.getpid(), args


def opened(ctx, queue, values, name):
    queue.put((ctx.rank, os.getpid()))
    values += ctx.rank
    with ctx.open_store(name, timeout=LIMIT) as store:
        found = store.topology, str(store.selection)

    manager = ctx.open_manager()
    return *found, values, torch.get_num_threads(), (manager.rank, manager.world_size), sys.exc_info()


def tensors(ctx):
    whole = torch.arange(1_000_000) + ctx.rank
    return {
        "large": torch.arange(25_000_000, dtype=torch.float32).add_(ctx.rank),
        "view": whole[10:13],
        "conj": torch.tensor([1 + 2j, ctx.rank + 0j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "bfloat16": torch.arange(4, dtype=torch.bfloat16),
        "float8": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        "grad": torch.arange(3.0, requires_grad=True) * 2,
        "scalar": torch.tensor(ctx.rank),
        "empty": torch.empty(0, 3),
        "expanded": torch.arange(3).expand(2, 3),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.arange(2.0)),
    }


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fails(ctx):
    Meeting(ctx).all("begun")
    if ctx.rank == 1:
        error = ValueError("with a lock")
        error.lock = threading.Lock()
        raise error from KeyError("the cause")

    ctx.open_store("nobody else comes", timeout=LIMIT)


def fails_oddly(ctx, how):
    if how == "odd":
        raise OddError("this", "that")

    if how == "exit":
        sys.exit(5)

    return [threading.Lock()]


def dies(ctx, how, victim):
    meeting = Meeting(ctx)
    meeting.all("begun")
    if ctx.rank == victim:
        if how == "fork" and not os.fork():
            time.sleep(LIMIT)  # it has copies of all that the killed one had open

        if how == "status":
            os._exit(3)

        os.kill(os.getpid(), signal.SIGKILL)

    ctx.open_store("nobody else comes", timeout=LIMIT)


def told(ctx):
    """Rank 0 hears of the loss, and raises, before anybody has seen it."""
    meeting = Meeting(ctx)
    meeting.all("begun")
    if ctx.rank == 0:
        raise PeerLostError("rank 1 is gone")

    try:
        ctx.open_store("nobody else comes", timeout=LIMIT)
    except AbortedError:  # spawn has heard of rank 0
        os.kill(os.getpid(), signal.SIGKILL)


def survives(ctx, queue, how):
    """Say what the others hear of rank 1's end."""
    store = ctx.open_store("x", timeout=LIMIT)
    store.barrier()
    if ctx.rank == 1:
        if how == "raises":
            raise ValueError("first")

        os.kill(os.getpid(), signal.SIGKILL)

    try:
        store.barrier()
    except PeerLostError as error:
        queue.put((ctx.rank, str(error)))
        raise


def busy(ctx, how):
    Meeting(ctx).all("begun")
    if ctx.rank == 1 and how == "raises":
        raise ValueError("first")

    if ctx.rank == 1 and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)

    if ctx.rank != 1 and how != "stopped":
        time.sleep(LIMIT)


def quiet(ctx):
    """Returns; a thread of it goes on for a while."""
    threading.Thread(target=time.sleep, args=(0.5,)).start()
    return os.getpid()


def nests(ctx, ranks_as):
    return os.getpid(), spawn(who, 2, ranks_as=ranks_as, timeout=LIMIT)


def waits(ctx):
    ctx.open_store("nobody comes", timeout=LIMIT)
'''


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory):
    """The functions that ranks run: a module that other processes can import, since they are given ``sys.path``."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "spawned_ranks.py").write_text(RANKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("spawned_ranks")

    sys.modules.pop("spawned_ranks", None)


@pytest.fixture(autouse=True)
def nothing_outlives_a_run():
    resource_tracker.ensure_running()
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # its library keeps a pipe for the next one
    before = Held.now()
    yield
    assert left_behind(before, 5.0) == []
    assert multiprocessing.active_children() == []


def processes(fn, world_size, *args, **options):
    return spawn(fn, world_size, args=args, ranks_as="processes", **{"timeout": LIMIT, **options})


class TestResults:
    def test_ranks_are_dealt_to_processes_in_order(self, ranks):
        results = processes(ranks.who, 3, "a", 2, threads_per_process=2, devices=["cpu", torch.device("cpu"), "cpu"])
        assert [result[:4] for result in results] == [(rank, 3, "cpu", f"rank {rank}") for rank in range(3)]
        assert [result[5] for result in results] == [("a", 2)] * 3
        first, second, third = (result[4] for result in results)
        assert first == second != third
        assert os.getpid() not in (first, third)

    def test_ranks_open_what_they_share(self, ranks, site, monkeypatch):
        """They meet; arguments are each rank's own, by value; queues of multiprocessing may be among them."""
        site.backend("fake-dist", "fake", "Support.yes(1, 'it fits all')", plugin="fake")
        site.backend("other-dist", "other", plugin="other")
        refresh()
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        values, own_threads = torch.arange(100_000), torch.get_num_threads()
        queue = multiprocessing.get_context("spawn").Queue()
        torch.set_num_threads(6)
        try:
            with use_backend(store="fake"):
                results = processes(ranks.opened, 3, queue, values, "x")

            assert torch.get_num_threads() == 6
        finally:
            torch.set_num_threads(own_threads)

        said = dict(queue.get(timeout=LIMIT) for _ in range(3))
        queue.close()
        queue.join_thread()
        for rank, (topology, selection, changed, threads, manager, _) in enumerate(results):
            assert [member.pid for member in topology] == [said[other] for other in range(3)]
            assert topology.same_host and not topology.same_process and topology.same_device
            assert "fake (decided by use_backend)" in selection
            assert torch.equal(changed, torch.arange(100_000) + rank)
            assert threads == 2
            assert manager == (rank, 3)

        assert torch.equal(values, torch.arange(100_000))
        assert not values.is_shared()

    def test_tensors_come_by_value(self, ranks):
        results = processes(ranks.tensors, 2)
        for rank, result in enumerate(results):
            assert torch.equal(result["large"], torch.arange(25_000_000, dtype=torch.float32).add_(rank))
            assert torch.equal(result["view"], torch.arange(10, 13) + rank)
            assert result["view"].untyped_storage().nbytes() == 24
            assert result["conj"].tolist() == [1 - 2j, rank]
            assert result["neg"].tolist() == [-2]
            assert torch.equal(result["bfloat16"], torch.arange(4, dtype=torch.bfloat16))
            assert result["float8"].dtype is torch.float8_e4m3fn
            assert result["float8"].float().tolist() == [0, 1, 2, 3]
            assert result["grad"].tolist() == [0, 2, 4] and result["grad"].requires_grad and result["grad"].is_leaf
            assert result["scalar"].item() == rank
            assert result["empty"].shape == (0, 3)
            assert result["expanded"].tolist() == [[0, 1, 2]] * 2
            assert torch.equal(result["transposed"], torch.arange(6).reshape(2, 3).t())
            assert isinstance(result["parameter"], torch.nn.Parameter) and result["parameter"].tolist() == [0, 1]
            assert not any(value.is_shared() for value in result.values())

    def test_result_is_awaited_no_longer_than_its_process_needs(self, ranks):
        (pid,) = processes(ranks.quiet, 1)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_time_limit_of_a_year(self, ranks):
        (pid,) = spawn(ranks.quiet, 1, ranks_as="processes", timeout=365 * 86400.0)
        assert pid != os.getpid()

    @pytest.mark.parametrize("ranks_as", ["threads", "processes"])
    def test_spawn_within_a_rank(self, ranks, ranks_as):
        ((outer, inner),) = processes(ranks.nests, 1, ranks_as)
        assert [result[0] for result in inner] == [0, 1]
        assert len({outer, *(result[4] for result in inner)}) == (1 if ranks_as == "threads" else 3)

    def test_kit_runs_functions_over_processes(self, ranks):
        results = run_ranks(ranks.who, 3, LIMIT, args=("a",), ranks_as="processes", threads_per_process=3)
        assert len({result[4] for result in results}) == 1
        assert [result[0] for result in results] == [0, 1, 2]


class TestFailure:
    def test_first_failure_ends_the_run_with_its_rank_and_traceback(self, ranks):
        with pytest.raises(RankFailedError) as caught:
            processes(ranks.fails, 3, threads_per_process=2)

        assert caught.value.rank == 1
        text = str(caught.value)
        assert text.startswith("rank 1 of 3 failed with ValueError: with a lock\n\nTraceback of rank 1 (pid ")
        for part in ("in fails", "KeyError: 'the cause'\n"):
            assert part in text

        assert "did not return" not in text
        # It has a lock, so it can't come itself; its cause can.
        assert type(caught.value.__cause__) is DtorchError
        assert str(caught.value.__cause__) == "ValueError: with a lock"
        assert isinstance(caught.value.__cause__.__cause__, KeyError)

    @pytest.mark.parametrize(
        ("how", "said", "cause"),
        [
            ("odd", "OddError: this and that", DtorchError),
            ("exit", "SystemExit: 5", SystemExit),
            ("result", "TypeError: what rank 0 returned, a list, can't be pickled for the process .*lock", TypeError),
        ],
    )
    def test_rank_that_fails_in_an_odd_way(self, ranks, how, said, cause):
        with pytest.raises(RankFailedError, match=f"^rank 0 of 1 failed with {said}") as caught:
            processes(ranks.fails_oddly, 1, how)

        assert type(caught.value.__cause__) is cause

    @pytest.mark.parametrize(
        ("how", "world_size", "per_process", "said"),
        [
            ("kill", 4, 2, r"rank 2, rank 3 of 4 \(pid \d+\) were killed by SIGKILL$"),
            ("status", 2, 1, r"rank 1 of 2 \(pid \d+\) ended with exit status 3$"),
            ("fork", 2, 1, r"rank 1 of 2 \(pid \d+\) was killed by SIGKILL$"),
        ],
    )
    def test_process_that_dies_is_its_ranks_failure(self, ranks, how, world_size, per_process, said):
        with pytest.raises(RankFailedError, match=said) as caught:
            processes(ranks.dies, world_size, how, world_size - 1, threads_per_process=per_process)

        assert caught.value.rank == (2 if per_process == 2 else 1)
        assert caught.value.__cause__ is None

    def test_rank_that_was_only_told_is_not_the_one_named(self, ranks):
        with pytest.raises(RankFailedError, match=r"^rank 1 of 2 \(pid \d+\) was killed by SIGKILL$"):
            processes(ranks.told, 2)

    def test_busy_rank_is_ended_with_its_process_and_named(self, ranks):
        said = r"rank 1 of 3 failed with ValueError: first; rank 0, rank 2 did not .* were ended \(pid \d+, \d+\)"
        with pytest.raises(RankFailedError, match=said):
            processes(ranks.busy, 3, "raises")

    @pytest.mark.parametrize("how", ["raises", "is killed"])
    def test_stores_of_the_others_hear_it_first(self, ranks, how):
        """Not from spawn, which could only say that the run is over."""
        pytest.importorskip("dtorch_file_store")
        queue = multiprocessing.get_context("spawn").Queue()
        with pytest.raises(RankFailedError, match="^rank 1 of 3 "):
            processes(ranks.survives, 3, queue, how, threads_per_process=2 if how == "raises" else 1)

        said = dict(queue.get(timeout=LIMIT) for _ in range(2))
        queue.close()
        queue.join_thread()
        assert said.keys() == {0, 2}
        for text in said.values():
            assert re.search(r"rank 1 \(pid \d+\) was lost", text)
            assert how != "raises" or "rank 1 failed: ValueError: first" in text

    def test_failure_of_a_peer_ends_a_run_of_processes_inside_a_rank(self, ranks):
        def rank(ctx):
            if ctx.rank == 1:
                processes(ranks.waits, 2)

            time.sleep(0.3)
            raise ValueError("outer")

        began = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 0 of 2 failed with ValueError: outer"):
            run_ranks(rank, 2, LIMIT)

        assert time.monotonic() - began < PROMPT


class TestTimeout:
    @pytest.mark.parametrize(("how", "late"), [("sleeps", "rank 0, rank 2"), ("stopped", "rank 1")])
    def test_timeout_ends_the_run_and_names_who_is_late(self, ranks, monkeypatch, how, late):
        def begin_late(run, timeout):
            """The time counts from when the others have returned: how long processes start is the machine's matter."""
            run._pump(lambda: len(run.unfinished()) == len(late.split(", ")), LIMIT)
            waited.append(time.monotonic())
            wait(run, timeout)

        wait, waited = ProcessRun.wait, []
        monkeypatch.setattr(ProcessRun, "wait", begin_late)
        said = f"^spawn: {late} of 3 had not returned after 0.2 s; {late} did not return within 1 s, so "
        with pytest.raises(StoreTimeoutError, match=said):
            processes(ranks.busy, 3, how, timeout=0.2)

        assert time.monotonic() - waited[0] < PROMPT

    def test_timeout_before_the_ranks_began(self, ranks):
        with pytest.raises(StoreTimeoutError, match="^spawn: rank 0, rank 1 of 2 had not returned after 0.1 s$"):
            processes(ranks.who, 2, timeout=0.1)


SCRIPT = """
import os, sys, time
from dtorch_core import spawn

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
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True))
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

    def test_main_module_that_can_not_be_imported_again(self, script):
        process = script(guard="if __name__ != '__main__': sys.exit(7)\nelse:")
        _, stderr = process.communicate(timeout=LIMIT)
        assert "ended with exit status 7 before it began: the new interpreter could not import the main" in stderr


class TestArguments:
    def test_what_can_not_be_pickled_is_named_before_anything_starts(self, ranks, monkeypatch):
        def local(ctx): ...

        started = []
        monkeypatch.setattr(popen_spawn_posix.util, "spawnv_passfds", lambda *_: started.append(1))
        for fn, args, said in (
            (lambda ctx: None, (), r"fn, .*<lambda> \(.*_processes.py:\d+\), is a lambda, .* at a module's level"),
            (local, (), r"fn, .*local \(.*:\d+\), is a local function, which can't be pickled"),
            (ranks.who, (1, threading.Lock()), r"args\[1\], a _thread.lock, can't be pickled .*cannot pickle"),
            (ranks.who, ([lambda: 0],), r"args\[0\], a list, can't be pickled .*<lambda>"),
            (Callable(threading.Lock()), (), r"fn, a .*Callable, can't be pickled"),
        ):
            with pytest.raises(TypeError, match=said):
                processes(fn, 2, *args)

        assert started == []

    def test_function_that_was_typed_in_is_refused(self):
        code = "from dtorch_core import spawn\ndef f(ctx): ...\nspawn(f, 2, ranks_as='processes')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
        assert "TypeError: spawn: fn, f (<string>:2), was typed into an interpreter" in done.stderr

    def test_daemonic_process_is_refused(self, ranks, monkeypatch):
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
        with pytest.raises(UnsupportedOperationError, match="daemonic process of multiprocessing, which may not have"):
            processes(ranks.who, 2)


class Callable:
    def __init__(self, lock):
        self.lock = lock

    def __call__(self, ctx): ...
