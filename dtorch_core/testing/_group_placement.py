"""Placements over a group: every conversion, on random shapes, against the dense tensor that the parts stand for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core.group import ThreadGroup
from dtorch_core.placement import redistribute
from dtorch_core.testing._group_base import PAIR_AND_MORE, GroupConformance
from dtorch_core.testing._harness import requires

CASES = 40
"""Random conversions for each seed."""


class PlacementTests(GroupConformance):
    """:func:`dtorch_core.redistribute` along one mesh dimension."""

    @requires("uneven")
    @PAIR_AND_MORE
    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_redistribution_agrees_with_the_dense_tensor(self, world_size: int, seed: int, device: str) -> None:
        """Odd, uneven and empty shards, negative dims, sums: exact, since the values are whole numbers."""

        def body(group: ThreadGroup) -> None:
            draw = random.Random(seed)  # the same on every rank
            for case in range(CASES):
                shape = [draw.choice((0, 1, 2, 3, 5, 7)) for _ in range(draw.choice((1, 2, 3)))]
                dense = torch.arange(torch.Size(shape).numel()).reshape(shape) * 3 + case
                source, target = (_placement(draw, len(shape)) for _ in range(2))
                mine = _part(dense, source, group).to(group.device)
                got = redistribute(mine, group, source, target, shape=draw.choice((None, tuple(shape))))
                what = f"case {case}: {shape} from {source} to {target}, rank {group.rank}"
                if isinstance(target, Partial):
                    got, target = group.all_reduce(got), Replicate()  # its parts are free, their sum is not

                wanted = _part(dense, target, group)
                assert got.shape == wanted.shape and torch.equal(got.cpu(), wanted), what

        self.ranks(body, world_size, device)


def _placement(draw: random.Random, dims: int) -> Any:  # noqa: ANN401 - torch's placements share no public base
    kind = draw.choice(("shard", "shard", "replicate", "partial"))
    return Shard(draw.randrange(-dims, dims)) if kind == "shard" else Replicate() if kind == "replicate" else Partial()


def _part(dense: Tensor, placement: Any, group: ThreadGroup) -> Tensor:  # noqa: ANN401
    """What this rank holds of ``dense``."""
    if isinstance(placement, Shard):
        parts = dense.chunk(group.world_size, placement.dim)
        return parts[group.rank] if group.rank < len(parts) else dense.narrow(placement.dim, 0, 0)

    if isinstance(placement, Partial):
        # Contributions that differ on every rank and add up to the whole.
        own = dense + 11 * (group.rank + 1)
        rest = sum(11 * (rank + 1) for rank in range(group.world_size)) + (group.world_size - 1) * dense
        return own - rest if group.rank == 0 else own

    return dense
