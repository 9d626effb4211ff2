"""One opening of one memory store: what its ranks share, and how it ends."""

from __future__ import annotations

import os
from collections.abc import Callable

from dtorch_core.errors import AbortedError
from dtorch_core.presence import Failure, Presence
from dtorch_memory_store.gates import Gate
from dtorch_memory_store.joint import Joint
from dtorch_memory_store.keys import Keys
from dtorch_memory_store.mail import Letters
from dtorch_memory_store.publication import Publication
from dtorch_memory_store.waiting import Owed, Waiter, fail, wake_all


class Session:
    """Keys, gates, joint work and letters of the same ranks, under one mutex."""

    def __init__(self, label: str, world_size: int) -> None:
        self.presence = Presence(label, [os.getpid()] * world_size)
        self._owed: Owed = {}
        self._reset = Gate("reset", self.presence, self._owed)
        self._barrier = Gate("barrier", self.presence, self._owed, elsewhere=self._reset.here)
        self.keys = Keys(self.presence, self._reset.here, self._owed)
        self.joint = Joint(self.presence, self._owed)
        self.letters = Letters(self.presence, self.joint.over, self._owed)

    def check_open(self, rank: int) -> None:
        """:raises AbortedError: if the rank has closed its handle."""
        with self.presence.mutex:
            self.presence.check_open(rank)

    def barrier(self, rank: int, timeout: float) -> None:
        """Wait for every rank."""
        self._barrier.pass_through(rank, timeout, opening=_nothing, coming=_nothing)

    def reset(self, rank: int, timeout: float) -> None:
        """Drop every key, once all ranks are here. This rank's other waits are over at once."""
        dropped: list[Publication] = []  # let go on return: tensors are not freed under the mutex

        def drop() -> None:
            # Not those in reset(): it is they who did it.
            text = f"{self.presence.label}: it was reset meanwhile"
            fail(self.keys.waiters(), lambda _: lambda: AbortedError(text), self._owed)
            self._barrier.end(lambda _: lambda: AbortedError(text))
            dropped.extend(self.keys.drop())

        try:
            with self.presence.mutex:
                self._end_waits_of(rank, f"{self.presence.me(rank)}: it called reset()", self._barrier)
        finally:
            wake_all(self._owed)

        self._reset.pass_through(rank, timeout, opening=drop, coming=self._give_up)

    def close(self, rank: int) -> None:
        """Say goodbye: waits that only this rank could satisfy end."""

        def leave() -> None:
            self.presence.leave(rank)
            self.keys.abandon(rank)
            self._end_waits_of(rank, f"{self.presence.me(rank)}: it was closed", self._barrier, self._reset)

        self._end(leave)

    def die(self, rank: int, reason: str) -> None:
        """The rank failed: every wait that is not satisfied ends, now and later."""
        self._end(lambda: self.presence.die(rank, reason))

    def abort(self, reason: str) -> None:
        """End every wait of every rank, now and later."""
        self._end(lambda: self.presence.abort(reason))

    def _end(self, how: Callable[[], None]) -> None:
        """Tell everybody that somebody has left, and what that ends.

        :param how: does no harm if it is called twice; under the mutex.
        """
        try:
            self._tell(how)
        except BaseException:  # Ctrl-C: what is begun is seen to its end
            self._tell(how)
            raise

    def _tell(self, how: Callable[[], None]) -> None:
        with self.presence.mutex:
            how()

        # What an interrupted thread has left can end well still.
        self.joint.mend()
        self.keys.mend()
        self.letters.mend()
        with self.presence.mutex:
            self._give_up()

        wake_all(self._owed)

    def _give_up(self) -> None:
        """Whatever can't end well any more, since somebody left."""
        for part in (self.keys, self._barrier, self._reset, self.joint, self.letters):
            part.give_up()

    def _end_waits_of(self, rank: int, reason: str, *gates: Gate) -> None:
        def failure_of(waiter: Waiter) -> Failure | None:
            return (lambda: AbortedError(reason)) if waiter.rank == rank else None

        fail(self.keys.waiters(), failure_of, self._owed)
        for gate in gates:
            gate.end(failure_of)


def _nothing() -> None:
    pass
