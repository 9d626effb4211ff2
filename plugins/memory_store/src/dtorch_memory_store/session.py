"""One opening of one memory store: what its ranks share, and how it ends."""

from __future__ import annotations

import os

from dtorch_core.errors import AbortedError
from dtorch_core.presence import Failure, Presence, settle
from dtorch_memory_store.gates import Gate
from dtorch_memory_store.joint import Joint
from dtorch_memory_store.keys import Keys, Publication
from dtorch_memory_store.mail import Letters
from dtorch_memory_store.waiting import Waiter, wake


class Session:
    """Keys, gates, joint work and letters of the same ranks, under one mutex."""

    def __init__(self, label: str, world_size: int) -> None:
        self.presence = Presence(label, [os.getpid()] * world_size)
        self._reset = Gate("reset", self.presence)
        self._barrier = Gate("barrier", self.presence, elsewhere=self._reset.here)
        self.keys = Keys(self.presence, resetting=self._reset.here)
        self.joint = Joint(self.presence)
        self.letters = Letters(self.presence, self.joint.over)

    def check_open(self, rank: int) -> None:
        """:raises AbortedError: if the rank has closed its handle."""
        with self.presence.mutex:
            self.presence.check_open(rank)

    def barrier(self, rank: int, timeout: float) -> None:
        """Wait for every rank."""
        self._barrier.pass_through(rank, timeout, opening=list, coming=list)

    def reset(self, rank: int, timeout: float) -> None:
        """Drop every key, once all ranks are here. This rank's other waits are over at once."""
        dropped: list[Publication] = []  # let go on return: tensors are not freed under the mutex

        def drop() -> list[Waiter]:
            # Not those in reset(): it is they who did it.
            text = f"{self.presence.label}: it was reset meanwhile"
            woken = settle(self.keys.waiters(), lambda _: lambda: AbortedError(text))
            woken += self._barrier.end(lambda _: lambda: AbortedError(text))
            dropped.extend(self.keys.drop())
            return woken

        with self.presence.mutex:
            woken = self._end_waits_of(rank, f"{self.presence.me(rank)}: it called reset()", self._barrier)

        wake(woken)
        self._reset.pass_through(rank, timeout, opening=drop, coming=self._give_up)

    def close(self, rank: int) -> None:
        """Say goodbye: waits that only this rank could satisfy end."""
        with self.presence.mutex:
            if rank in self.presence.closed:
                return

            self.presence.leave(rank)
            self.keys.abandon(rank)
            reason = f"{self.presence.me(rank)}: it was closed"
            woken = self._end_waits_of(rank, reason, self._barrier, self._reset) + self._give_up()

        wake(woken)

    def die(self, rank: int, reason: str) -> None:
        """The rank failed: every wait that is not satisfied ends, now and later."""
        with self.presence.mutex:
            self.presence.die(rank, reason)
            woken = self._give_up()

        wake(woken)

    def abort(self, reason: str) -> None:
        """End every wait of every rank, now and later."""
        with self.presence.mutex:
            self.presence.abort(reason)
            woken = self._give_up()

        wake(woken)

    def _give_up(self) -> list[Waiter]:
        """Whatever can't end well any more, since somebody left: the waiters to wake."""
        parts = (self.keys, self._barrier, self._reset, self.joint, self.letters)
        return [waiter for part in parts for waiter in part.give_up()]

    def _end_waits_of(self, rank: int, reason: str, *gates: Gate) -> list[Waiter]:
        def failure_of(waiter: Waiter) -> Failure | None:
            return (lambda: AbortedError(reason)) if waiter.rank == rank else None

        woken = settle(self.keys.waiters(), failure_of)
        return woken + [waiter for gate in gates for waiter in gate.end(failure_of)]
