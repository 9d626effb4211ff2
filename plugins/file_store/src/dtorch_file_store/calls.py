"""One piece of joint work, as this node knows it: what the ranks have brought, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtorch_core.declared import Place
from dtorch_core.joint import Work
from dtorch_file_store.offers import Brought
from dtorch_file_store.waiting import Waiter

LINE = "\n"
"""A note's first line says what the work is; the rest is data."""


QUEUED = -1
"""In a thread's place: the one that comes by next."""


class Held(NamedTuple):
    """A rank's CUDA tensors, which the work reads and writes until it is done."""

    tensors: Sequence[Tensor]
    copies: Sequence[Tensor | None] = ()
    """What it reads and writes in their place: for each one that others can't map. Empty if they can map all."""


class Call:
    """One piece of joint work, as this node knows it."""

    __slots__ = (
        "awaited",
        "awaits",
        "broken",
        "came",
        "done",
        "dropped",
        "error",
        "finished",
        "halves",
        "held",
        "key",
        "notes",
        "notices",
        "offers",
        "parted",
        "queue",
        "returned",
        "running",
        "said",
        "steps",
        "waiters",
        "work",
        "written",
    )

    def __init__(self, key: str, world_size: int) -> None:
        self.key = key
        self.offers: list[Brought | None] = [None] * world_size
        self.came = 0
        self.work: Work | None = None
        """From the first rank of this node; all bring the same, or it says what is wrong."""
        self.notes: Sequence[str] = ()
        self.written: Sequence[Place] = ()
        """The tensors that it writes, of all ranks; where that is asked for."""
        self.waiters: list[Waiter] = []
        self.notices: list[Waiter] = []
        """Told at the end only, while waiters are also woken to go on."""
        self.steps: Iterator[int] | None = None
        """This node's part: it yields the exchange that it can't go on without."""
        self.awaits = -1
        """That exchange."""
        self.awaited: Sequence[int] = ()
        """The nodes that have to reach it."""
        self.queue: torch.cuda.Stream | None = None
        """On CUDA, the stream of the first rank of this node."""
        self.done: tuple[Any, ...] = ()
        """On CUDA, the points of streams behind which the work is done."""
        self.held: dict[int, Held] = {}
        """On CUDA, this node's tensors until their rank's stream is behind the work."""
        self.returned: dict[int, torch.cuda.Event] = {}
        """On CUDA, when the values came back from copies, by rank."""
        self.dropped: set[int] = set()
        """Ranks whose ticket was dropped before they had waited."""
        self.said: dict[int, int] = {}
        """How far each node says it is."""
        self.halves: dict[int, tuple[int, int, int]] = {}
        """Each node's staging buffer: segment, place, bytes of a half."""
        self.parted: set[int] = set()
        """Nodes that have ended their part, and read nothing any more."""
        self.running = 0
        """The thread that is at it, by its number, or :data:`QUEUED`; 0 if none is."""
        self.broken: BaseException | None = None
        """Why another node can't do its part: this one does its own as far as it can without."""
        self.finished = False
        self.error: BaseException | None = None

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank, offer in enumerate(self.offers) if offer is None]

    def halted(self, number: int) -> list[int]:
        """The nodes that have not reached exchange ``number``, of those that have to."""
        return [node for node in self.awaited if self.said.get(node, -1) < number] if self.awaited else []

    def what(self, rank: int) -> str:
        """How messages to ``rank`` call it."""
        offer = self.offers[rank]
        return f"{self.key}, {offer.note.partition(LINE)[0]}" if offer is not None else self.key

    def moves(self) -> bool:
        """There is nothing to look for: it is finished, or a thread is at it."""
        return self.finished or self.running != 0

    @property
    def complete(self) -> bool:
        """All ranks have come."""
        return self.came == len(self.offers)
