"""The training examples: their loss curves are those of one rank, and they say no where they are not."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from dtorch_core.cli import main

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = str(EXAMPLES / "torchrun_script.py")


@pytest.fixture(params=["train_fsdp2", "train_ddp"])
def example(request, monkeypatch):
    """The example's main module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module(request.param)
    for name in [name for name in sys.modules if name.partition(".")[0] in (request.param, "training")]:
        del sys.modules[name]


class TestTraining:
    def test_four_ranks_learn_what_one_learns(self, example, capsys):
        assert example.main([]) == 0
        said = re.search(r"on 4 ranks: loss (\S+) to (\S+) in 50 steps; .* one rank (\S+)$", capsys.readouterr().out)
        assert said is not None
        assert float(said[1]) > 4 > 1 > float(said[2]) and float(said[3]) < 1e-4

    def test_curves_that_differ_fail(self, example, monkeypatch, capsys):
        monkeypatch.setattr(example, "mean", lambda loss: loss)  # of its own part of the batch alone
        assert example.main(["--ranks", "2"]) == 1

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    def test_four_ranks_of_one_gpu_learn_what_one_learns(self, example, capsys):
        assert example.main(["--device", "cuda:0"]) == 0, capsys.readouterr().out


class TestTorchrunScript:
    def test_it_runs_on_four_ranks_of_one_device(self, capfd):
        assert main(["run", "--nproc", "4", SCRIPT, "--epochs", "2"]) == 0
        captured = capfd.readouterr()
        lines = captured.out.splitlines()
        for rank in range(4):
            assert any(line.startswith(f"[rank {rank}] rank {rank} of 4 on c") for line in lines)

        losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("[rank 0] epoch")]
        assert len(losses) == 2 and losses[1] < losses[0]
        [said] = [line for line in captured.err.splitlines() if line.startswith("dtorch run:")]
        assert re.fullmatch(r"dtorch run: the script asks for '\w+': 4 ranks on c\S+ use samedevice", said)

    def test_it_says_the_same_twice(self, capfd):
        said = []
        for _ in range(2):
            assert main(["run", "--nproc", "2", SCRIPT, "--epochs", "1"]) == 0
            said.append(sorted(capfd.readouterr().out.splitlines()))

        assert said[0] == said[1]
