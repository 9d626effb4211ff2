"""Small words between the companions of a group, over its control store. Each is heard when it comes; none waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from dtorch_core import DtorchError, TensorStore
from dtorch_core.mail import Receipt

TAG = -1
"""Of the letters. Messages of the group have others."""

Words = dict[str, Any]


class Letters:
    """One rank's letter box."""

    def __init__(
        self, store: TensorStore, heard: Callable[[int, Words], None], ended: Callable[[int, DtorchError], None]
    ) -> None:
        """
        :param heard: called with the sender and its words, in the order of each sender, on any thread. Must not block.
        :param ended: called once for a rank from which nothing will come any more, with the store's error.
        """
        self._store, self._heard, self._ended = store, heard, ended
        self.others = [rank for rank in range(store.world_size) if rank != store.rank]

    def open(self) -> None:
        """Begin to listen."""
        for rank in self.others:
            self._listen(rank)

    def send(self, rank: int, words: Words) -> None:
        """Send; what can't be sent any more is lost, and so is its receiver."""
        with suppress(DtorchError):
            self._store.send(torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8), rank, TAG)

    def send_all(self, words: Words) -> None:
        """Send to every other rank."""
        for rank in self.others:
            self.send(rank, words)

    def _listen(self, rank: int) -> None:
        try:
            receipt = self._store.expect(rank, TAG)
        except DtorchError as error:
            self._ended(rank, error)
        else:
            receipt.add_done_callback(lambda: self._on(rank, receipt))

    def _on(self, rank: int, receipt: Receipt) -> None:
        try:
            text, _ = receipt.wait(0)
        except DtorchError as error:
            self._ended(rank, error)
            return

        self._heard(rank, json.loads(bytes(text.tolist())))
        self._listen(rank)
