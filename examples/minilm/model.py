"""The embedding model all-MiniLM-L6-v2: a BERT encoder of 6 layers and 12 heads, then the mean of its tokens.

One and the same code runs on one rank with whole weights and on many ranks with a part of each: every rank has some
of the heads, and some of the feed-forward's inner values. ``sum_over_ranks`` and ``replicate`` are all that differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional

HIDDEN = 384
HEAD_SIZE = 32
EPSILON = 1e-12


class MiniLM:
    """One rank's part of the model.

    :param weights: by their names in the checkpoint; whole, or this rank's part.
    :param first_token: the token that row 0 of this rank's word embeddings stands for.
    :param sum_over_ranks: the sum of a tensor over all ranks; on a single rank that is the tensor itself.
    :param replicate: the same, in memory of its own: a Partial becomes a Replicate.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        first_token: int = 0,
        sum_over_ranks: Callable[[Tensor], Tensor] = lambda term: term,
        replicate: Callable[[Tensor], Tensor] = lambda term: term,
    ) -> None:
        self._weights = weights
        self._first_token = first_token
        self._sum = sum_over_ranks
        self._replicate = replicate
        self._layers = len({name.split(".")[2] for name in weights if name.startswith("encoder.layer.")})

    def __call__(self, batch: Tensor) -> Tensor:
        """Embed a batch of shape (2, sentences, tokens), ids and mask: (sentences, 384), each of length 1."""
        ids, mask = batch
        x = self._embeddings(ids)
        for layer in range(self._layers):
            prefix = f"encoder.layer.{layer}"
            x = self._norm(f"{prefix}.attention.output", x + self._attention(f"{prefix}.attention", x, mask))
            x = self._norm(f"{prefix}.output", x + self._feed_forward(prefix, x))

        counted = mask.unsqueeze(-1).to(x.dtype)
        return functional.normalize((x * counted).sum(1) / counted.sum(1), dim=1)

    def _embeddings(self, ids: Tensor) -> Tensor:
        words = self._weights["embeddings.word_embeddings.weight"]
        rows = ids - self._first_token
        ours = (rows >= 0) & (rows < len(words))  # another rank has the other tokens; here they count as zero
        word = self._replicate(words[rows.clamp(0, len(words) - 1)].mul_(ours.unsqueeze(-1)))
        position = self._weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        kind = self._weights["embeddings.token_type_embeddings.weight"][0]
        return self._norm("embeddings", word + position + kind)

    def _attention(self, name: str, x: Tensor, mask: Tensor) -> Tensor:
        """This rank's heads, then the sum over all heads of all ranks."""
        query, key, value = (self._heads(self._linear(f"{name}.self.{part}", x)) for part in ("query", "key", "value"))
        scores = query @ key.transpose(-1, -2) / math.sqrt(HEAD_SIZE)
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -math.inf)  # nobody looks at padding
        seen = scores.softmax(-1) @ value
        return self._linear_over_ranks(f"{name}.output.dense", seen.transpose(1, 2).flatten(2))

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        """This rank's inner values, then the sum over all ranks."""
        inner = functional.gelu(self._linear(f"{name}.intermediate.dense", x))
        return self._linear_over_ranks(f"{name}.output.dense", inner)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _linear_over_ranks(self, name: str, x: Tensor) -> Tensor:
        term = functional.linear(x, self._weights[f"{name}.weight"])
        return self._sum(term) + self._weights[f"{name}.bias"]  # the bias once, not once a rank

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.LayerNorm.weight"], self._weights[f"{name}.LayerNorm.bias"]
        normal: Tensor = functional.layer_norm(x, (HIDDEN,), weight, bias, EPSILON)
        return normal

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        """(sentences, tokens, heads * 32) to (sentences, heads, tokens, 32)."""
        heads: Tensor = x.unflatten(-1, (-1, HEAD_SIZE))
        return heads.transpose(1, 2)
