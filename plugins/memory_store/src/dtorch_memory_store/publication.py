"""One generation of one key."""

from __future__ import annotations

import torch
from torch import Tensor

from dtorch_memory_store.waiting import Waiter


class Publication:
    """What one rank has published: who has taken a share of it, who has finished, and who waits for that."""

    __slots__ = ("events", "finished", "get_count", "owner", "ready", "takers", "tensor", "waiters")

    def __init__(self, owner: int, tensor: Tensor, get_count: int, ready: torch.cuda.Event | None) -> None:
        self.owner = owner
        self.tensor: Tensor | None = tensor
        self.get_count = get_count
        self.ready = ready
        self.takers: set[int] = set()
        self.finished: set[int] = set()
        self.events: list[torch.cuda.Event] = []
        self.waiters: list[Waiter] = []

    def has_share_for(self, rank: int) -> bool:
        """One is left, and ``rank`` has had none."""
        return len(self.takers) < self.get_count and rank not in self.takers

    @property
    def borrowers(self) -> set[int]:
        """The ranks that have taken a share and not finished."""
        return self.takers - self.finished
