"""A small transformer that learns to answer each word with the next one, and the loop that trains it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 32, 4, 2, 16, 16, 50


class Model(nn.Module):
    """Embedding, encoder layers, and a head that scores every word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) / WIDTH**0.5)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """(sentences, places) of words to (sentences * places, words) of scores."""
        x = self.embedding(words) + self.place
        for layer in self.layers:
            x = layer(x)

        scores: Tensor = self.head(x.flatten(0, 1))
        return scores


def make() -> Model:
    """The model as it is at first: the same on every rank, whose random numbers are its own."""
    torch.manual_seed(0)
    return Model()


def batches() -> Tensor:
    """(steps, sentences, places): the words of every step."""
    return torch.randint(WORDS, (STEPS, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, rank: int, world_size: int, device: str, mean: Callable[[Tensor], Tensor]) -> list[float]:
    """Train on this rank's part of every batch; the loss of every step.

    :param mean: of the loss over the ranks.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for batch in batches().to(device):
        words = batch.chunk(world_size)[rank]
        loss = nn.functional.cross_entropy(model(words), (words.flatten() + 1) % WORDS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean(loss.detach()))

    return torch.stack(losses).tolist()


def compared(name: str, losses: list[float], alone: list[float], tolerance: float = 1e-4) -> int:
    """Say how the curves compare; an exit status."""
    apart = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
    curve = f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps"
    print(f"{name}: {curve}; largest difference to one rank {apart:.1e}")
    return 0 if apart < tolerance and losses[-1] < losses[0] else 1
