"""dtorch run in this process, which is then as it was before."""

import os
import signal
import sys
import textwrap
import threading

import pytest
import torch

from dtorch_core.cli import main

LIMIT = 60.0

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
