"""Every weight of the checkpoint and how it is split over the ranks.

A linear layer is ``y = x @ weight.T + bias`` with ``weight`` of shape (outputs, inputs). Two layers in a row are split
so that only their sum has to be exchanged:

- the first by COLUMNS: each rank computes some of the outputs, from the whole input;
- the second by ROWS: each rank takes just those as its inputs, and gives one term of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from tqdm import tqdm

from dtorch_core import TensorStore, scatter_tensor

COLUMNS, ROWS, VOCABULARY, COPY = Shard(0), Shard(1), Shard(0), Replicate()

EMBEDDINGS: Mapping[str, Placement] = {
    "embeddings.word_embeddings.weight": VOCABULARY,
    "embeddings.position_embeddings.weight": COPY,
    "embeddings.token_type_embeddings.weight": COPY,
    "embeddings.LayerNorm.weight": COPY,
    "embeddings.LayerNorm.bias": COPY,
}
LAYER: Mapping[str, Placement] = {
    "attention.self.query.weight": COLUMNS,
    "attention.self.query.bias": COLUMNS,
    "attention.self.key.weight": COLUMNS,
    "attention.self.key.bias": COLUMNS,
    "attention.self.value.weight": COLUMNS,
    "attention.self.value.bias": COLUMNS,
    "attention.output.dense.weight": ROWS,
    "attention.output.dense.bias": COPY,
    "attention.output.LayerNorm.weight": COPY,
    "attention.output.LayerNorm.bias": COPY,
    "intermediate.dense.weight": COLUMNS,
    "intermediate.dense.bias": COLUMNS,
    "output.dense.weight": ROWS,
    "output.dense.bias": COPY,
    "output.LayerNorm.weight": COPY,
    "output.LayerNorm.bias": COPY,
}
LAYERS = 6
VOCABULARY_SIZE = 30522

PLACEMENTS: Mapping[str, Placement] = {
    **EMBEDDINGS,
    **{f"encoder.layer.{layer}.{name}": split for layer in range(LAYERS) for name, split in LAYER.items()},
}
"""All the weights that the embedding needs, by their names in the checkpoint."""


def first_token(rank: int, world_size: int) -> int:
    """The token that this rank's part of the word embeddings begins with; Shard deals rows as ``torch.chunk`` does."""
    return rank * math.ceil(VOCABULARY_SIZE / world_size)


def read_weights(model_path: Path) -> dict[str, Tensor]:
    """The whole weights, on the CPU."""
    checkpoint = load_file(model_path / "model.safetensors")
    return {name: checkpoint[name] for name in PLACEMENTS}


def scatter_weights(full: Mapping[str, Tensor] | None, store: TensorStore) -> dict[str, Tensor]:
    """This rank's part of every weight, on its device. Collective: ``full`` is given on rank 0 and None elsewhere."""
    mesh = list(range(store.world_size))
    parts = {}
    for name, placement in tqdm(PLACEMENTS.items(), "sharding weights", disable=store.rank != 0, leave=False):
        part = scatter_tensor(full[name] if full is not None else None, store, mesh, [placement], src=0)
        assert part is not None, "every rank is in the mesh"
        parts[name] = part

    return parts
