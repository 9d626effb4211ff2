"""The sentences of the example, and how they become batches of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

SENTENCES = Path(__file__).with_name("sentences.txt")


def read_sentences(path: Path = SENTENCES) -> list[tuple[str, str]]:
    """``(topic, sentence)`` pairs. A line ``# topic`` names the topic of the lines below it."""
    topic, pairs = "", []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            topic = line.lstrip("# ")
        elif line:
            pairs.append((topic, line))

    return pairs


def batches(sentences: Sequence[str], size: int, model_path: Path) -> list[Tensor]:
    """Token ids, ``size`` sentences at a time: each batch is int64 of shape (2, sentences, tokens).

    ``batch[0]`` are the ids, padded to the longest sentence of the batch; ``batch[1]`` is 1 where there is a token
    and 0 where there is padding.
    """
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(256)
    encoded = []
    for start in range(0, len(sentences), size):
        rows = tokenizer.encode_batch(list(sentences[start : start + size]))
        encoded.append(torch.tensor([[row.ids for row in rows], [row.attention_mask for row in rows]]))

    return encoded
