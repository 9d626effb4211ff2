"""Turns a collective call into joint work on a store: numbers it, fingerprints it, and compares the fingerprints.

A fingerprint is the first line of an offer's note; what follows is data that may differ between the ranks.

Each rank counts its calls. Calls with one number meet under one key; if their fingerprints differ, every rank raises
CollectiveMismatchError with a table of who called what, and the group stays usable: all raised at one number.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from dtorch_core import CollectiveMismatchError, TensorStore
from dtorch_core._text import rank_list
from dtorch_core.joint import Offer, Ticket
from dtorch_samedevice_group.blocks import Task
from dtorch_samedevice_group.collectives import Collective


class Engine:
    """One rank's side of the group's calls."""

    def __init__(self, store: TensorStore, name: str) -> None:
        self.store = store
        self.rank = store.rank
        self.world_size = store.world_size
        self._name = name
        self._numbers = itertools.count()
        self._reserved = threading.local()

    def post(self, call: str, tensors: Sequence[Tensor], work: Collective) -> Ticket:
        """Post one collective; ``call`` is its fingerprint, as a person would write the call."""
        key = f"collective #{self._next()}"
        return self.store.post(key, call, tensors, self._compared(key, work))

    def post_note(self, call: str, text: str) -> Ticket:
        """Give every rank this rank's text, which may differ."""
        return self.post(f"{call}\n{text}", (), nothing)

    def refuse(self, call: str, error: Exception) -> None:
        """This rank's call is wrong by itself. Its peers learn so at once, instead of waiting for it."""
        self.post(f"{call}: raised {type(error).__name__}: {error}".replace("\n", " "), (), nothing)

    def reserve(self) -> AbstractContextManager[None]:
        """Take the next number now; the call made under the context has it, whatever was called meanwhile."""
        return self._numbered(next(self._numbers))

    @contextmanager
    def _numbered(self, number: int) -> Iterator[None]:
        self._reserved.number = number
        try:
            yield
        finally:
            self._reserved.number = None

    def _next(self) -> int:
        number: int | None = getattr(self._reserved, "number", None)
        return next(self._numbers) if number is None else number

    def _compared(self, key: str, work: Collective) -> Collective:
        def compare_and_work(offers: Sequence[Offer]) -> Sequence[Task]:
            first = offers[0].note
            for offer in offers:
                if offer.note != first:
                    self._compare(key, offers)
                    break

            if any(tensor.is_inference() for offer in offers for tensor in offer.tensors):
                return _in_inference_mode(work, offers)

            return work(offers)

        return compare_and_work

    def _compare(self, key: str, offers: Sequence[Offer]) -> None:
        callers: dict[str, list[int]] = {}
        for offer in offers:
            callers.setdefault(offer.note.partition("\n")[0], []).append(offer.rank)

        if len(callers) == 1:
            return

        ranked = sorted(callers.values(), key=len, reverse=True)
        if len(ranked[0]) > len(ranked[1]):
            odd = rank_list(rank for ranks in ranked[1:] for rank in ranks)
            head = f"{odd} called something else than {rank_list(ranked[0])}"
        else:
            head = f"{rank_list(range(len(offers)))} called different things"

        table = "\n".join(f"  {rank_list(ranks)}: {call}" for call, ranks in callers.items())
        raise CollectiveMismatchError(f"group {self._name!r}, {key}: {head}\n{table}")


def _in_inference_mode(work: Collective, offers: Sequence[Offer]) -> Sequence[Task]:
    """Tensors made under inference_mode are written under it alone, whichever rank's thread works."""
    with torch.inference_mode():
        for task in work(offers):
            task()

    return ()


def nothing(offers: Sequence[Offer]) -> Sequence[Task]:
    """The work of a call that moves no tensor: that all have come is the point."""
    return ()
