"""``dtorch bench`` in this process, and times as it would measure them."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("torch")

from dtorch_core.bench import report
from dtorch_core.bench.cells import Cell
from dtorch_core.bench.collectives import PROCESSES
from dtorch_core.bench.crew import answer
from dtorch_core.bench.floors import FLOOR, HAND_OFF
from dtorch_core.bench.groups import DTORCH, THREADED
from dtorch_core.bench.peers import GLOO, NCCL
from dtorch_core.bench.processes import SOCKET
from dtorch_core.bench.sizes import GIB, KIB, MIB
from dtorch_core.bench.timing import Series
from dtorch_core.cli import main


@pytest.fixture
def dtorch(capsys):
    def run(*arguments):
        capsys.readouterr()
        status = main(["bench", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def times(nbytes):
    """Three rounds in which each subject's time is a line of its own, and the second one was disturbed."""
    lines = {DTORCH: (40e-6, 9), PROCESSES: (80e-6, 4), GLOO: (900e-6, 1), FLOOR: (1e-6, 10), NCCL: (60e-6, 100)}
    lines[THREADED] = 90e-6, 0.5
    found = {name: [fixed + nbytes / (speed * GIB)] * 3 for name, (fixed, speed) in lines.items()}
    found |= {HAND_OFF: [50e-6] * 3, SOCKET: [60e-6] * 3}
    return Series({name: [each[0], each[1] * 5, each[2]] for name, each in found.items()})


@pytest.fixture
def measured():
    cells = [Cell("all_reduce", nbytes, 2, "cpu") for nbytes in (KIB, MIB, 64 * MIB)]
    return report.Measured({cell: times(cell.nbytes) for cell in cells})


def inner(number):
    """Twice the number, which is none below zero."""
    if number < 0:
        raise ValueError("below zero")

    return 2 * number


INTERRUPT = 7


def interrupted(rank, ranks, meeting, pipe):
    """A process of a crew: its measurement of so many calls is that in which Ctrl-C reaches all processes."""

    def timed(count):
        if count == INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)
            if rank == 0:
                os.kill(os.getppid(), signal.SIGINT)

        return float(count)

    answer(pipe, lambda: timed)
