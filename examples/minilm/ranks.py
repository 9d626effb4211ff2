"""What each rank does: take its part of the weights, then embed batch after batch together with the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from dtorch_core import GetTensorOp, RankContext, plan_redistribution, redistribute
from minilm.model import MiniLM
from minilm.requests import Requests
from minilm.weights import first_token, read_weights, scatter_weights

NO_TOKENS = torch.empty(0, dtype=torch.int64)
"""Tells the ranks that no more requests come."""


@dataclass
class Traffic:
    """Bytes that one rank exchanged with the others, and the threads that it computed with."""

    threads: int
    """Intra-op threads."""
    weights: int = 0
    """Its part of the weights, once."""
    tokens: int = 0
    sums: int = 0
    """The terms that it gave to be added."""


def serve(ctx: RankContext, model_path: Path, requests: Requests) -> Traffic:
    """Embed what comes in on ``requests`` until a None comes. Rank 0 alone reads the queue and the checkpoint."""
    store = ctx.open_store("weights and tokens")
    group = ctx.open_group("tensor parallel")
    assert group is not None, "every rank is in this group"
    if ctx.rank == 0:
        plan = plan_redistribution(range(ctx.world_size), [Partial()], [Replicate()])
        print(f"{store.selection}\n\n{group.selection}\n\n{plan}\n", flush=True)

    weights = scatter_weights(read_weights(model_path) if ctx.rank == 0 else None, store)
    traffic = Traffic(torch.get_num_threads(), weights=sum(part.nbytes for part in weights.values()))

    def sum_over_ranks(term: Tensor) -> Tensor:
        traffic.sums += term.nbytes
        total: Tensor = group.all_reduce(term, out=term)  # in place: a term alone is of no further use
        return total

    def replicate(term: Tensor) -> Tensor:
        traffic.sums += term.nbytes
        return redistribute(term, group, Partial(), Replicate())  # what the plan says

    model = MiniLM(weights, first_token(ctx.rank, ctx.world_size), sum_over_ranks, replicate)
    while True:
        request = requests.get() if ctx.rank == 0 else None
        if ctx.rank == 0:
            tokens = request.tokens if request is not None else NO_TOKENS
            store.src_set("tokens", tokens, get_count=ctx.world_size, dest_device=ctx.device)

        with store.borrow("tokens") as tokens:
            traffic.tokens += tokens.nbytes
            embeddings = model(tokens) if tokens.numel() else None

        if ctx.rank == 0:
            store.src_wait_until_get_finished("tokens")

        if embeddings is None:
            return traffic

        if request is not None:
            # Returns at once, also while a GPU is still busy: the future is fulfilled when the GPU gets there.
            GetTensorOp(request.promise)(embeddings)
