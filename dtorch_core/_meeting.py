"""One opening's ranks exchange texts, round by round, over a c10d Store.

Each round ends in one verdict, written once by compare-and-set: "ok" by the last rank to arrive, or the reason why
it failed, by a rank that gave up. So every rank sees the same end, and nobody waits for a rank that has left.
Nothing that arrives is unpickled: the texts are JSON.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtorch_core import _scope
from dtorch_core._text import rank_list, seconds
from dtorch_core.errors import AbortedError, PeerLostError, ProtocolError, StoreTimeoutError

OK = "ok"


class Meeting:
    """The ranks that open one name together."""

    def __init__(
        self, store: dist.Store, label: str, path: str, rank: int, world_size: int, timeout: float
    ) -> None:
        self._root = dist.PrefixStore(f"dtorch/{path}/", store)
        self._label = label
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._pending: str | None = None
        self.store = self._join()
        """The store under this opening's own prefix: an opening never sees the keys of another one."""

    def exchange(self, step: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Give every rank this rank's payload; return all of them in rank order.

        :raises StoreTimeoutError: if a rank has not come in time; the message names it.
        :raises AbortedError: if this rank's run was ended meanwhile.
        """
        self.store.set(f"{step}/{self._rank}", json.dumps(payload))
        if self.store.add(f"{step}/arrived", 1) == self._world_size:
            self._end(step, OK)

        verdict = self._await(step)
        if verdict != OK:
            if self._reason is not None:
                raise AbortedError(f"{self._label}: {self._reason}")

            raise StoreTimeoutError(f"{self._label}, rank {self._rank}: {verdict}")

        return [json.loads(self.store.get(f"{step}/{rank}")) for rank in range(self._world_size)]

    def abort(self, reason: str, *, died: bool = False) -> None:
        """Wake this meeting's waits on every rank."""
        with self._lock:
            self._reason = self._reason or reason
            step = self._pending

        if step is not None:
            self._end(step, f"given up: {reason}")

    def _join(self) -> dist.Store:
        """Find the opening to take part in: the first in which this rank has not been, and that has not failed."""
        number = int(self._root.get("openings")) if self._root.check(["openings"]) else 0
        while True:
            store = dist.PrefixStore(f"{number}/", self._root)
            if not store.check(["members/verdict"]):
                if store.add(f"here/{self._rank}", 1) == 1:
                    break

                if not store.check(["members/verdict"]):
                    raise ProtocolError(
                        f"{self._label}: two callers say that they are rank {self._rank}; each rank opens a name once"
                    )

            number += 1

        self._number = number
        size = store.compare_set("world_size", "", str(self._world_size)).decode()
        if size != str(self._world_size):
            self.store = store
            self._end("members", f"rank {self._rank} says that there are {self._world_size} ranks, others say {size}")
            raise ProtocolError(
                f"{self._label}: rank {self._rank} says world_size={self._world_size}, the ranks before it {size}"
            )

        return store

    def _end(self, step: str, verdict: str) -> str:
        """Write the round's verdict unless it has one; return the one that holds."""
        held = self.store.compare_set(f"{step}/verdict", "", verdict).decode()
        if held == verdict and step == "members":
            # A hint: later openings start their search here. One that lags behind is as right, only slower.
            self._root.set("openings", str(self._number + 1))

        return held

    def _await(self, step: str) -> str:
        key = f"{step}/verdict"
        with self._lock:
            self._pending = step
            reason = self._reason

        if reason is not None:
            return self._end(step, f"given up: {reason}")

        scope = _scope.current()
        if scope is not None:
            scope.add(self)

        left = max(self._deadline - time.monotonic(), 0.001)
        try:
            self.store.wait([key], timedelta(seconds=left))
        except dist.DistError as error:
            if time.monotonic() < self._deadline - 0.05:
                raise PeerLostError(
                    f"{self._label}, rank {self._rank}: the rendezvous is gone ({error}); has rank 0's process ended?"
                ) from error

            return self._end(step, self._too_late(step))

        return self.store.get(key).decode()

    def _too_late(self, step: str) -> str:
        missing = [rank for rank in range(self._world_size) if not self.store.check([f"{step}/{rank}"])]
        return (
            f"rank {self._rank} gave up after {seconds(self._timeout)}: {rank_list(missing)} had not come. "
            f"Start every rank, with the same name and world_size, or pass a longer timeout"
        )
