"""dtorch run: a torchrun script, unmodified, whose ranks are threads of one process, or processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from importlib import metadata

import pytest
import torch

from dtorch_core import _passed_signals
from dtorch_core.cli import main

LIMIT = 60.0

NCCL_NAMES = [
    name
    for name in ("nccl-legacy", "nccl2", "nccl-lazy")
    if metadata.entry_points(group="torch.distributed.backends", name=name)
]
"""What torch has besides ``nccl``, since 2.14."""

BEGIN = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


def state():
    """What a run changes in its process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    return {
        "arguments": list(sys.argv),
        "path": list(sys.path),
        "environment": dict(os.environ),
        "class": type(os.environ),
        "main": sys.modules["__main__"],
        "handlers": [signal.getsignal(number) for number in numbers],
        "functions": [signal.signal, signal.getsignal, threading.Thread.start],
        "c10d": [torch.distributed.distributed_c10d.rendezvous, torch.distributed.distributed_c10d._world],
        "name": torch.distributed.get_backend,
    }


@pytest.fixture
def run(tmp_path, capfd):
    """Run a script in this process, on the CPU where none is said: the status, and the lines of stdout and stderr."""

    def run(body, *options, arguments=(), nproc=2, begin=BEGIN):
        if "--device" not in options:
            options = "--device", "cpu", *options

        script = tmp_path / "script.py"
        script.write_text(begin + textwrap.dedent(body))
        before = state()
        capfd.readouterr()
        status = main(["run", "--nproc", str(nproc), *options, str(script), *arguments])
        captured = capfd.readouterr()
        after = state()
        assert [name for name in before if before[name] != after[name]] == []
        return status, sorted(captured.out.splitlines()), captured.err.splitlines()

    return run


class TestScript:
    def test_each_rank_says_who_it_is(self, run):
        body = """
        if __name__ == "__main__":
            dist.init_process_group("gloo")
            x = torch.arange(3) + 10 * dist.get_rank()
            dist.all_reduce(x)
            print(rank, os.environ["LOCAL_RANK"], os.getenv("LOCAL_WORLD_SIZE"), dist.get_world_size(), x.tolist())
            dist.destroy_process_group()
        """
        status, out, err = run(body, nproc=3)
        assert status == 0
        assert out == [f"[rank {rank}] {rank} {rank} 3 3 [30, 33, 36]" for rank in range(3)]
        assert err == ["dtorch run: the script asks for 'gloo': 3 ranks on cpu use samedevice"]

    @pytest.mark.parametrize(
        ("call", "shown"),
        [
            ("'nccl'", "'nccl'"),
            ("backend='nccl', init_method='env://'", "'nccl'"),
            ("'cpu:gloo,cuda:nccl'", "'cpu:gloo,cuda:nccl'"),
            ("", "a process group without naming a backend"),
            *((repr(name), repr(name)) for name in NCCL_NAMES),
        ],
    )
    def test_what_it_asks_for_is_on_what_fits(self, run, call, shown):
        body = f"""
        dist.init_process_group({call})
        x = torch.tensor(rank)
        dist.all_reduce(x, group=dist.new_group())
        print(x.item())
        """
        status, out, err = run(body)
        assert (status, out) == (0, ["[rank 0] 1", "[rank 1] 1"])
        assert err == [f"dtorch run: the script asks for {shown}: 2 ranks on cpu use samedevice"]

    @pytest.mark.parametrize("asked", ["gloo", "nccl", "dtorch", "cpu:gloo,cuda:nccl"])
    def test_a_group_is_called_what_it_stands_for(self, run, asked):
        """Libraries choose by that name: pytorch-ignite wraps a model in DDP for those that it knows."""
        body = f"""
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("{asked}")
        named, same = dist.new_group(backend="gloo"), dist.new_group()
        mesh = init_device_mesh("cpu", (2,)).get_group()
        print(*(dist.get_backend(group) for group in (None, dist.group.WORLD, same, mesh)), dist.get_backend(named))
        print(named.name(), same.name())
        """
        status, out, _ = run(body)
        called = "gloo" if asked in ("gloo", "nccl") else "dtorch"
        assert status == 0
        texts = f"{called} {called} {called} {called} gloo", "samedevice samedevice"
        assert out == [f"[rank {rank}] {text}" for rank in range(2) for text in texts]

    def test_a_backend_of_torch_can_be_named_for_it(self, run):
        body = """
        dist.init_process_group("nccl")
        x = torch.tensor(rank)
        dist.all_reduce(x)
        print(dist.get_backend(), x.item())
        """
        status, out, err = run(body, "--nccl-as", "gloo")
        assert (status, out) == (0, ["[rank 0] gloo 1", "[rank 1] gloo 1"])
        assert err == ["dtorch run: the script asks for 'nccl': 2 ranks on cpu use gloo"]

    @pytest.mark.parametrize("option", ["--nproc", "--n"])  # its own option, and one that could be short for several
    def test_arguments_are_the_scripts(self, run, option):
        body = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--nproc", type=int)
        parser.add_argument("rest", nargs="*")
        folder, name = os.path.split(sys.argv[0])
        print(parser.parse_args(), name, os.path.isabs(__file__), sys.path[0] == os.path.dirname(__file__))
        """
        status, out, _ = run(body, arguments=(option, "7", "a", "b"))
        assert status == 0
        assert out == [f"[rank {rank}] Namespace(nproc=7, rest=['a', 'b']) script.py True True" for rank in range(2)]

    def test_variables_and_classes_are_each_ranks(self, run):
        body = """
        import pickle
        from dataclasses import dataclass

        dist.init_process_group("gloo")
        mine = rank

        @dataclass
        class Thing:
            value: "int"

        def answer():
            return mine

        dist.barrier()
        assert pickle.loads(pickle.dumps(Thing(rank))) == Thing(rank)
        import __main__
        from __main__ import mine as imported
        print(answer(), sys.modules["__main__"].mine, imported, __main__.Thing is Thing, vars(__main__)["mine"])
        """
        status, out, _ = run(body)
        assert (status, out) == (0, [f"[rank {rank}] {rank} {rank} {rank} True {rank}" for rank in range(2)])

    def test_the_environment_is_each_ranks(self, run, monkeypatch):
        monkeypatch.setenv("DTORCH_TEST_GIVEN", "given")
        body = """
        dist.init_process_group("gloo")
        os.environ["OWN"] = str(rank)
        if rank == 0:
            del os.environ["DTORCH_TEST_GIVEN"]

        dist.barrier()
        copied = os.environ.copy()
        given = os.environ.pop("DTORCH_TEST_GIVEN", None)
        assert "DTORCH_TEST_GIVEN" not in os.environ and len(os.environ) == len(list(os.environ))
        print(os.environ["OWN"], copied["OWN"], copied["RANK"], given, "HOME" in copied, os.getenv("NONE", "no"))
        try:
            os.environ["OWN"] = 3
        except TypeError as error:
            print(error)
        """
        home = "HOME" in os.environ
        status, out, _ = run(body)
        assert status == 0
        assert out == [
            f"[rank 0] 0 0 0 None {home} no", "[rank 0] str expected, not int",
            f"[rank 1] 1 1 1 given {home} no", "[rank 1] str expected, not int",
        ]  # fmt: skip

    def test_random_numbers_are_each_ranks(self, run):
        body = """
        dist.init_process_group("gloo")
        torch.manual_seed(rank)
        for _ in range(3):
            dist.barrier()
            print(torch.rand(1).item())
        """
        _, out, _ = run(body)
        expected = []
        for rank in range(2):
            torch.manual_seed(rank)
            expected += [f"[rank {rank}] {torch.rand(1).item()}" for _ in range(3)]

        assert out == sorted(expected)

    def test_a_group_can_be_opened_again(self, run):
        body = """
        for number in range(3):
            dist.init_process_group("gloo")
            x = torch.tensor(rank + number)
            dist.all_reduce(x)
            assert x == 2 * number + 1
            dist.destroy_process_group()
        """
        assert run(body)[0] == 0

    def test_a_store_of_its_own_works(self, run):
        body = """
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0)
        store.set(f"from {rank}", str(10 + rank))
        print(int(store.get(f"from {1 - rank}")))
        store.set(f"done {rank}", "")
        store.wait(["done 0", "done 1"])
        dist.init_process_group("gloo", store=dist.PrefixStore("x", store), rank=rank, world_size=world_size)
        dist.barrier()
        """
        assert run(body)[:2] == (0, ["[rank 0] 11", "[rank 1] 10"])

    def test_a_mesh_opens_the_default_group(self, run):
        body = """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (world_size,))
        print(distribute_tensor(torch.arange(6), mesh, [Shard(0)]).to_local().tolist(), os.environ["RANK"])
        """
        assert run(body)[:2] == (0, ["[rank 0] [0, 1, 2] 0", "[rank 1] [3, 4, 5] 1"])

    def test_a_module_can_be_run(self, tmp_path, capfd, monkeypatch):
        (tmp_path / "some_package").mkdir()
        (tmp_path / "some_package" / "__init__.py").touch()
        text = "from . import part\nprint(__name__, part.x, __spec__.name)"
        (tmp_path / "some_package" / "__main__.py").write_text(text)
        (tmp_path / "some_package" / "part.py").write_text("x = 3")
        monkeypatch.chdir(tmp_path)
        try:
            assert main(["run", "-m", "some_package"]) == 0
        finally:
            for name in [name for name in sys.modules if name.startswith("some_package")]:
                del sys.modules[name]

        lines = sorted(capfd.readouterr().out.splitlines())
        assert lines == [f"[rank {rank}] __main__ 3 some_package.__main__" for rank in range(2)]

    def test_ranks_may_be_processes(self, run):
        body = """
        dist.init_process_group("nccl")
        x = torch.arange(3) + 10 * rank
        dist.all_reduce(x)
        print(os.environ["LOCAL_RANK"], x.tolist(), len(sys.argv), __name__)
        sys.exit(rank * 3)
        """
        status, out, err = run(body, "--ranks-as", "processes", arguments=("one",))
        assert (status, out) == (3, ["[rank 0] 0 [10, 12, 14] 2 __main__", "[rank 1] 1 [10, 12, 14] 2 __main__"])
        assert "dtorch run: the script asks for 'nccl': 2 ranks on cpu use samedevice" in err
        assert any(line.startswith("dtorch run: rank 1 of 2 failed with SystemExit: 3") for line in err)

    def test_ranks_may_start_processes(self, run):
        body = """
        from torch.utils.data import DataLoader

        if __name__ == "__main__":
            batches = [batch.tolist() for batch in DataLoader(range(rank, rank + 4), 2, num_workers=1)]
            print(batches)
        """
        assert run(body)[:2] == (0, ["[rank 0] [[0, 1], [2, 3]]", "[rank 1] [[1, 2], [3, 4]]"])

    def test_processes_of_a_rank_start_as_the_callers_do(self, run):
        body = """
        import multiprocessing
        print(multiprocessing.get_start_method(allow_none=True))
        """
        method = multiprocessing.get_start_method(allow_none=True)
        assert run(body, "--ranks-as", "processes", nproc=1)[:2] == (0, [f"[rank 0] {method}"])


class TestOutput:
    def test_lines_are_whole_and_labelled(self, run):
        body = """
        dist.init_process_group("gloo")
        for number in range(50):
            print("a", end=" ", flush=True)
            dist.barrier()
            print("b", rank, number)

        thread = threading.Thread(target=lambda: print("helper"))
        thread.start()
        thread.join()
        sys.stdout.write("two\\nlines\\n")
        print("10 %\\r20 %", end="\\r30 %")
        """
        _, out, _ = run(body)
        for rank in range(2):
            own = [line for line in out if line.startswith(f"[rank {rank}] ")]
            rest = [f"[rank {rank}] {text}" for text in ("helper", "two", "lines", "30 %")]
            assert sorted(own) == sorted([*(f"[rank {rank}] a b {rank} {number}" for number in range(50)), *rest])

        assert len(out) == 108

    def test_errors_are_labelled_as_well(self, run):
        status, out, err = run("print('bad', rank, file=sys.stderr)")
        assert (status, out, sorted(err)) == (0, [], ["[rank 0] bad 0", "[rank 1] bad 1"])


class TestFailure:
    def test_the_first_failure_ends_all_with_its_traceback(self, run):
        body = """
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            raise ValueError("no")

        dist.barrier()
        print("not reached")
        """
        status, out, err = run(body, nproc=3)
        assert (status, out) == (1, [])
        assert "dtorch run: rank 1 of 3 failed with ValueError: no" in err
        assert any("script.py" in line and "line 11" in line for line in err) and "ValueError: no" in err

    @pytest.mark.parametrize(
        ("code", "status"), [("", 0), ("0", 0), ("None", 0), ("7", 7), ("'text'", 1), ("256 + 3", 3), ("True", 1)]
    )
    def test_exit_status_is_the_scripts(self, run, code, status):
        assert run(f"sys.exit({code})")[0] == status

    def test_a_script_that_is_not_there_is_refused(self, capfd):
        assert main(["run", "nonesuch.py"]) == 2
        assert "dtorch run: error: there is no file 'nonesuch.py'" in capfd.readouterr().err

    @pytest.mark.parametrize("name", ["nosuch.module", "./script.py", "", "__main__"])
    def test_a_module_that_is_not_there_is_refused(self, capfd, name):
        assert main(["run", "-m", name]) == 2
        shown = name.partition(".")[0] or name
        assert f"dtorch run: error: there is no module {shown!r}, neither installed nor in" in capfd.readouterr().err

    def test_a_backend_that_is_not_there_is_refused(self, capfd):
        assert main(["run", "--nccl-as", "samedevise", __file__]) == 2
        assert "there is no group backend 'samedevise'. Did you mean 'samedevice'?" in capfd.readouterr().err

    def test_a_script_that_is_no_python_is_its_ranks_failure(self, run):
        status, _, err = run("", begin="x = = 3\n")
        assert status == 1 and any("SyntaxError" in line for line in err)


class TestSignals:
    def test_handlers_are_each_ranks(self, run):
        body = """
        heard, before = threading.Event(), signal.getsignal(signal.SIGUSR1)

        def handler(number, frame):
            print("heard", rank, os.environ["RANK"], number == signal.SIGUSR1)
            heard.set()

        assert signal.signal(signal.SIGUSR1, handler) is before
        assert signal.getsignal(signal.SIGUSR1) is handler
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)

        assert heard.wait(30)
        """
        assert run(body)[:2] == (0, ["[rank 0] heard 0 0 True", "[rank 1] heard 1 1 True"])

    def test_an_interrupt_ends_all(self, run):
        body = """
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)

        dist.send(torch.zeros(1), dst=1 - rank)
        dist.recv(torch.zeros(1), src=1 - rank, tag=5)
        print("not reached")
        """
        assert run(body)[:2] == (130, [])

    @pytest.mark.parametrize("handled", [True, False])
    def test_a_signal_reaches_ranks_that_are_processes(self, tmp_path, handled):
        text = """
            import os, signal, torch, torch.distributed as dist
            stop = []
            if HANDLED:
                signal.signal(signal.SIGUSR1, lambda number, frame: print("heard", flush=True))
                signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
            dist.init_process_group()
            dist.barrier()
            print("ready", flush=True)
            while True:
                stops = torch.tensor([len(stop)])
                dist.all_reduce(stops)
                if stops:
                    break
        """
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text).replace("HANDLED", repr(handled)))
        command = [sys.executable, "-m", "dtorch_core", "run", "--nproc", "2", "--ranks-as", "processes", str(script)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
            alarm = threading.Timer(LIMIT, started.kill)
            alarm.start()
            try:
                assert {started.stdout.readline() for _ in range(2)} == {"[rank 0] ready\n", "[rank 1] ready\n"}
                if handled:
                    started.send_signal(signal.SIGUSR1)
                    assert {started.stdout.readline() for _ in range(2)} == {"[rank 0] heard\n", "[rank 1] heard\n"}

                started.send_signal(signal.SIGTERM)
                _, err = started.communicate()
            finally:
                alarm.cancel()
                started.kill()

        if handled:
            assert started.returncode == 0, err
        else:
            assert started.returncode == 128 + signal.SIGTERM
            assert "SIGTERM" in err

    def test_a_signal_that_comes_late_kills_no_rank_that_has_a_handler(self, tmp_path):
        """A peer may have ended because of it; and Python takes handlers back while it ends."""
        text = f"""
        import atexit, os, signal, threading
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        rank = threading.current_thread()

        def late():
            rank.join()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=late).start()
        left = {str(tmp_path / "left")!r}
        atexit.register(lambda: open(left, "w").write(f"{{signal.getsignal(signal.SIGTERM)!r}}"))
        """
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "dtorch_core", "run", "--nproc", "1", "--ranks-as", "processes", str(script)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        assert ran.returncode == 0, ran.stderr
        assert "SIG_IGN" in (tmp_path / "left").read_text()

    def test_a_signal_that_ranks_have_handled_is_not_the_status(self, tmp_path):
        text = """
        import signal, sys, threading
        heard = threading.Event()
        signal.signal(signal.SIGUSR1, lambda number, frame: heard.set())
        print("ready", flush=True)
        sys.exit(3 if heard.wait(30) else 4)
        """
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "dtorch_core", "run", "--nproc", "1", "--ranks-as", "processes", str(script)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
            alarm = threading.Timer(LIMIT, started.kill)
            alarm.start()
            try:
                assert started.stdout.readline() == "[rank 0] ready\n"
                started.send_signal(signal.SIGUSR1)
                _, err = started.communicate()
            finally:
                alarm.cancel()
                started.kill()

        assert started.returncode == 3, err

    def test_a_signal_before_any_process_is_started_does_what_it_did(self):
        heard = []
        before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
        try:
            with _passed_signals.passed_on() as passed:
                os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)

        assert heard == passed == [signal.SIGUSR1]

    def test_a_signal_that_nobody_handles_ends_the_process(self, tmp_path):
        text = "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGTERM)\n"
        (tmp_path / "script.py").write_text(f"{text}time.sleep(60)")
        command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-m", "dtorch_core", "run", "script.py"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=LIMIT)
        assert ended.returncode == -signal.SIGTERM
