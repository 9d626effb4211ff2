"""dtorch run: signals reach the ranks that handle them, and end the others."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from dtorch_core._spawn import passed_signals

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import script_runs
    from script_runs import LIMIT

run = script_runs.run


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
            with passed_signals.passed_on() as passed:
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
