"""One opening's ranks exchange texts, step by step, over a c10d Store.

Each step ends in one verdict, written once by compare-and-set: "ok" by the last rank to arrive, or why it failed, by
a rank that gave up. So every rank sees the same end, and nobody waits for a rank that has left. A rank that raises
between two steps ends those to come, and the openings nested in this one. Nothing that arrives is unpickled: the
texts are JSON.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from dtorch_core import _scope
from dtorch_core._futures import interruptibly
from dtorch_core._meeting import deaths
from dtorch_core._meeting.board import Board
from dtorch_core._selection.topology import Member, Topology
from dtorch_core._text import describe_error, rank_list, root_cause, seconds
from dtorch_core.checks import LONGEST
from dtorch_core.errors import AbortedError, DtorchError, PeerLostError, ProtocolError, StoreTimeoutError

OK = "ok"

STEPS = {
    "members": "had not come",
    "choice": "had not chosen a backend",
    "built": "had not come to what its backend exchanges",
    "ready": "had not built its handle",
}
"""The steps of an opening, and what is said of a rank that is late for each."""

ERRORS: dict[str, type[DtorchError]] = {
    error.__name__: error for error in (AbortedError, PeerLostError, ProtocolError, StoreTimeoutError)
}
"""What a rank that gave up may make its peers raise."""


class Meeting:
    """The ranks that open one name together; a context manager around the steps.

    :param label: how messages call the opening.
    :param path: tells apart what meets over one carrier: a kind and a name.
    :param timeout: seconds for the whole opening.
    :param started: when it began, on ``time.monotonic()``'s clock.
    :param parent: the opening that this one is a part of; it is given up with it.
    """

    def __init__(
        self,
        carrier: Board,
        label: str,
        path: str,
        rank: int,
        world_size: int,
        timeout: float,
        started: float,
        parent: Meeting | None = None,
    ) -> None:
        self._root = carrier.under(_under(path))
        self._label = label
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._deadline = started + min(timeout, LONGEST)
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._over = self._exchanged = False
        self._seen: Mapping[int, tuple[Member, ...]] = {} if parent is None else parent._seen
        """The other processes whose end can be seen here: by pid, with their ranks."""
        self._deaths: deaths.Deaths | None = None
        self._number = -1
        """This opening's, among those of its name; once this rank is counted there."""
        self.store = self._root
        """The store under this opening's own prefix: an opening never sees the keys of another one."""
        with self._reaching(), self._interruptible():
            self._join()
            if parent is not None and not parent._over:
                parent._adopt(path, self._number)

    def __enter__(self) -> Self:
        scope = _scope.current()
        if scope is not None:
            scope.add(self)

        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:  # an abort comes before, or finds nothing to end
            self._over = True

        if self._deaths is not None:
            self._deaths.close()

        try:
            if error is None:
                self._clean()
            else:
                lost = PeerLostError if isinstance(root_cause(error), PeerLostError) else AbortedError
                self._end_all(lost, f"rank {self._rank} failed: {describe_error(error)}")
        except RuntimeError:
            pass  # the rendezvous is gone: nobody is left to tell

    def watch(self, topology: Topology) -> None:
        """From now on the end of another rank's process on this host is the end of the opening on every rank."""
        member = topology[self._rank]
        self._seen = deaths.others(topology, member)
        if self._seen and topology.by_process()[member.process][0] == member:  # one rank of a process does it
            self._deaths = deaths.Deaths(self._seen, self._died, self._label)

    def _died(self, who: str) -> None:
        self._end_now(PeerLostError, f"{who} ended while it was opened")

    def exchange(self, step: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Give every rank this rank's payload; return all of them in rank order.

        :raises StoreTimeoutError: if a rank has not come in time; the message names it.
        :raises ProtocolError: if the ranks do not say the same world size.
        :raises AbortedError: if another rank failed, or this rank's run was ended.
        :raises PeerLostError: if the rendezvous is gone.
        """
        with self._reaching():
            self.store.set(f"{step}/{self._rank}", json.dumps([self._world_size, payload]))
            self._arrive(step)
            verdict = self._await(step)
            if verdict == OK:
                return self._read(step)

        if self._reason is not None:
            raise AbortedError(f"{self._label}: {self._reason}")

        raise self._error(verdict)

    def exchange_of_backend(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the factory of a backend exchanges.

        :raises ProtocolError: the second time, and when the opening is over.
        """
        if self._exchanged or self._over:
            raise ProtocolError(f"{self._label}, rank {self._rank}: exchange() is for the factory of a backend, once")

        self._exchanged = True
        return self.exchange("built", dict(payload))

    def failure(self, seconds: float) -> DtorchError | None:
        """What this opening fails with on every rank, if it does within so many seconds."""
        with self._reaching():
            try:
                self.store.wait(["failed"], timedelta(seconds=seconds))
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # late: a DistError, except for a FileStore's
                return None

            return self._error(self.store.get("failed").decode())

    def _error(self, verdict: str) -> DtorchError:
        name, _, text = verdict.partition(": ")
        return ERRORS.get(name, DtorchError)(f"{self._label}, rank {self._rank}: {text}")

    def abort(self, reason: str, *, died: bool = False) -> None:
        """Wake this meeting's waits on every rank, and those of what is nested in it."""
        with self._lock:
            self._reason = self._reason or reason

        self._end_now(AbortedError, reason)

    def _end_now(self, error: type[DtorchError], text: str) -> None:
        """End what is left while this rank may be waiting."""
        with self._lock:
            if self._over or self._root.lines.gone():
                return

            try:
                self._end_all(error, text)
            except RuntimeError:
                pass  # the rendezvous is gone, which ends every wait as well

    def _join(self) -> None:
        """Find the opening to take part in: the first in which this rank has not been, and that has not ended."""
        # Counts the openings whose first step has ended. May lag behind, which costs a look at each one in between.
        number = self._root.add("openings", 0)
        while True:
            store = self._root.under(str(number))
            if not store.check(["members/verdict"]):
                if store.add(f"here/{self._rank}", 1) == 1:
                    self._number, self.store = number, store
                    break

                if not store.check(["members/verdict"]):
                    raise ProtocolError(
                        f"{self._label}: two callers say that they are rank {self._rank}; each rank opens a name once "
                        f"(or a run that was killed has left its rendezvous behind: use a fresh one)"
                    )

            number += 1

        # The first one's word counts, until all of them are heard.
        self._size = int(store.compare_set("world_size", "", str(self._world_size)))

    def _arrive(self, step: str) -> None:
        """Count this rank; the last one ends the step."""
        arrived = self.store.add(f"{step}/arrived", 1)
        if self._world_size == self._size:
            if arrived == self._size:
                self._end(step, OK)
        elif arrived >= min(self._world_size, self._size):
            self._end(step, f"{ProtocolError.__name__}: {self._sizes(step)}")

    def _read(self, step: str) -> list[dict[str, Any]]:
        found = [json.loads(self.store.get(f"{step}/{rank}")) for rank in range(self._size)]
        if any(size != self._world_size for size, _ in found):
            raise ProtocolError(f"{self._label}: {self._sizes(step)}")

        return [payload for _, payload in found]

    def _sizes(self, step: str) -> str:
        said = [
            f"rank {rank} says {json.loads(self.store.get(f'{step}/{rank}'))[0]}"
            for rank in range(max(self._world_size, self._size))
            if self.store.check([f"{step}/{rank}"])
        ]
        return f"the ranks do not say the same world_size: {', '.join(said)}"

    def _adopt(self, path: str, number: int) -> None:
        """Remember a nested opening, so that it is given up with this one."""
        index = self.store.add("nested/count", 1)
        self.store.set(f"nested/{index}", json.dumps([path, number]))
        if self.store.check(["failed"]):  # perhaps before that was set: then nobody else ends the nested one
            _end_all(self.store.under(_under(path)), number, self.store.get("failed").decode())

    def _end_all(self, error: type[DtorchError], text: str) -> None:
        _end_all(self._root, self._number, f"{error.__name__}: {text}")

    def _end(self, step: str, verdict: str) -> str:
        return _end(self._root, self._number, step, verdict)

    def _await(self, step: str) -> str:
        key = f"{step}/verdict"
        left = max(self._deadline - time.monotonic(), 0.001)
        try:
            interruptibly(
                lambda: self.store.wait([key], timedelta(seconds=left)),
                f"{self._label} rank {self._rank} opens",
                self._interrupted,
            )
        except RuntimeError as error:  # a DistError, except for a FileStore's timeout
            if time.monotonic() < self._deadline - 0.05:
                raise self._lost(error) from error

            missing = [rank for rank in range(self._world_size) if not self.store.check([f"{step}/{rank}"])]
            return self._end(step, self._too_late(step, missing) if missing else OK)

        return self.store.get(key).decode()

    def _too_late(self, step: str, missing: list[int]) -> str:
        text = (
            f"{StoreTimeoutError.__name__}: rank {self._rank} gave up after {seconds(self._timeout)}: "
            f"{rank_list(missing)} {STEPS[step]}."
        )
        if step == "members":
            text += " Start every rank, with the same name and world_size, or pass a longer timeout"

        return text

    def _clean(self) -> None:
        """Remove what this opening wrote; done by the last rank that has read all of it."""
        if self.store.add("done", 1) < self._world_size:
            return

        if self._root.add("openings", 0) <= self._number:
            return  # a rank that opens the name next would take this opening for one that has not begun

        nested = self.store.add("nested/count", 0)
        keys = ["done", "world_size", "counted", "failed", "nested/count"]
        keys += [f"nested/{index}" for index in range(1, nested + 1)]
        keys += [f"here/{rank}" for rank in range(self._world_size)]
        for step in STEPS:
            keys += [f"{step}/{what}" for what in (*range(self._world_size), "arrived", "verdict")]

        for key in keys:
            self.store.delete_key(key)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C before the context of this meeting is entered ends it as one in there does."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and self._number >= 0:
                self._interrupted()

            raise

    def _interrupted(self) -> None:
        self._end_now(AbortedError, f"rank {self._rank} was interrupted while it was opened")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> PeerLostError:
        ended = deaths.first_ended(self._seen) if self._seen else ""
        return PeerLostError(
            f"{self._label}, rank {self._rank}: the rendezvous is gone ({str(error).splitlines()[0]}); "
            + (f"{ended} ended while it was opened" if ended else "has the process ended that serves it?")
        )


def _under(path: str) -> str:
    return f"dtorch/{path}"


def _end(root: Board, number: int, step: str, verdict: str) -> str:
    """Write a step's verdict unless it has one; return the one that holds."""
    opening = root.under(str(number))
    held = opening.compare_set(f"{step}/verdict", "", verdict).decode()
    if step == "members" and opening.add("counted", 1) == 1:
        root.add("openings", 1)

    return held


def _end_all(root: Board, number: int, verdict: str) -> None:
    """End what is left of an opening, and of those nested in it."""
    opening = root.under(str(number))
    opening.compare_set("failed", "", verdict)
    for step in STEPS:
        _end(root, number, step, verdict)

    for index in range(1, opening.add("nested/count", 0) + 1):
        if opening.check([f"nested/{index}"]):
            path, nested = json.loads(opening.get(f"nested/{index}"))
            _end_all(opening.under(_under(path)), nested, verdict)
