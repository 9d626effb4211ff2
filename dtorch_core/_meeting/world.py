"""The rendezvous of a world whose ranks meet in parts: all of them meet where the world's own rank 0 serves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtorch_core._meeting.board import Board
from dtorch_core._meeting.rendezvous import connect

if TYPE_CHECKING:
    from torch.distributed import Store


class World:
    """One rank's way to the rendezvous of its world, reached once and kept until it is closed.

    Rank 0 reaches it at once, and so serves it, whether or not it is in any part; the others when they first need it.
    """

    def __init__(self, rendezvous: Board | Store | str | None, rank: int, world_size: int, timeout: float) -> None:
        self._given = rendezvous
        self._rank, self._world_size = rank, world_size
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._closed = False
        if rank == 0 and world_size > 1 and (rendezvous is None or isinstance(rendezvous, str)):
            self.reach(timeout)

    def reach(self, timeout: float) -> Board:
        """
        :raises: what :func:`connect` does; the ranks in those messages are the world's.
        """
        with self._lock:
            board = self._board

        if board is None:
            board = connect(self._given, self._rank, self._world_size, timeout)
            with self._lock:
                if not self._closed:
                    board = self._board = self._board or board  # another thread may have been quicker

        return board

    def close(self) -> None:
        """Keep no connections any more. What is being opened has them until it ends."""
        with self._lock:
            self._closed, self._board = True, None


class Part:
    """Where some ranks of a world meet. They open under numbers of their own: rank i is the world's ``ranks[i]``."""

    def __init__(self, world: World, ranks: Sequence[int], name: str) -> None:
        """
        :param name: how messages call the world.
        """
        self._world, self._ranks = world, list(ranks)
        self.told = ""
        """What messages that name ranks add; empty where the numbers are the same."""
        if self._ranks != list(range(len(self._ranks))):
            self.told = f"the group's ranks are, in this order, ranks {self._ranks} of {name}"

    def reach(self, timeout: float) -> Board:
        if len(self._ranks) == 1:
            return connect(None, 0, 1, timeout)  # nobody to meet

        return self._world.reach(timeout)
