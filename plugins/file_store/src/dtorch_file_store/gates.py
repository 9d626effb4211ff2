"""Gates: a barrier, and the one that reset() waits at. Each opens when all ranks stand before it.

Every node knows who stands there. Passages are numbered: a rank that has come to passage n has come to it, also for
a node that hears so late; one that gives up says so, and comes again to the same number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from dtorch_core._text import rank_list
from dtorch_core.errors import AbortedError, ProtocolError, StoreTimeoutError
from dtorch_core.presence import Failure, not_all_came, raise_if, settle
from dtorch_file_store.node import Node
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame


class Gate:
    """Lets all through once all are here."""

    def __init__(self, name: str, node: Node, elsewhere: Callable[[], Collection[int]] = tuple) -> None:
        """
        :param elsewhere: ranks that stand before another gate, and so won't come.
        """
        self.name = name
        self.number = 0
        """How often it has opened."""
        self.on_opening: Callable[[], Iterable[Waiter]] = tuple
        """Called under the mutex before it opens. It and the next return waiters that they have settled."""
        self.on_coming: Callable[[], Iterable[Waiter]] = tuple
        """Called under the mutex when a rank has come and others are missing."""
        self._node = node
        self._presence = node.presence
        self._elsewhere = elsewhere
        self._here: dict[int, set[int]] = {}
        self._gave_up: set[int] = set()
        """Those that have stood here, and stepped back, since it has last opened."""
        self._opens = False
        """Set while it opens. Who has the mutex and finds it so comes after an interrupt."""
        self._waiters: dict[int, Waiter] = {}
        node.handlers[f"{name} here"] = self._come
        node.handlers[f"{name} gone"] = self._leave

    def pass_through(self, rank: int, timeout: float) -> None:
        """Wait for every rank."""
        node, presence, deadline = self._node, self._presence, time.monotonic() + timeout
        waiter = Waiter(rank)
        try:
            with node.mutex:
                presence.check_open(rank)
                if rank in self._waiters:
                    raise ProtocolError(f"{presence.me(rank)}: another thread of this rank is in {self.name}() already")

                here = self._here.setdefault(self.number, set())
                if len(here | {rank}) < presence.world_size or presence.all_said:  # those who died may stand here still
                    failure = self._why_shut(rank)
                    if failure is not None:
                        raise failure()

                self._waiters[rank] = waiter
                here.add(rank)
                self._gave_up.discard(rank)
                node.tell_all(frame(f"{self.name} here", rank, self.number))
                woken = self._moved()

            node.after(woken)
            passed = node.wait(waiter, deadline)
        except BaseException:
            self._withdraw(rank, waiter, timeout)
            raise

        if not passed:
            late = self._withdraw(rank, waiter, timeout)
            if not waiter.settled:
                raise StoreTimeoutError(f"{presence.me(rank)}, {self.name}(): {late}")

        raise_if(waiter.error)

    def standing(self) -> set[int]:
        """The ranks that stand here. Under the mutex."""
        return self._here.get(self.number, set())

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more: those settled. Under the mutex."""
        return self.end(lambda waiter: self._why_shut(waiter.rank))

    def end(self, failure_of: Callable[[Waiter], Failure | None]) -> list[Waiter]:
        """Fail the waits for which there is a failure: those settled. Under the mutex."""
        failed = settle(self._waiters.values(), failure_of)
        for waiter in failed:
            # It no longer stands here: its rank can come back before its thread has woken.
            self._step_back(waiter.rank)

        return failed

    def _withdraw(self, rank: int, waiter: Waiter, timeout: float) -> str:
        """Who was missing. If the gate has opened meanwhile, the waiter says so."""
        woken: list[Waiter] = []
        with self._node.mutex:
            if self._opens:
                woken += self._node.on_torn(f"{self.name}() opened")
                self._opens = False

            missing = [other for other in self._missing() if other not in self._gave_up]
            late = not_all_came(missing, self._gave_up, timeout)
            if not waiter.settled and self._waiters.get(rank) is waiter:
                self._step_back(rank)

        self._node.after(woken)
        return late

    def _step_back(self, rank: int) -> None:
        del self._waiters[rank]
        self.standing().discard(rank)
        self._gave_up.add(rank)
        self._node.tell_all(frame(f"{self.name} gone", rank, self.number))

    def _come(self, peer: int, message: Message) -> Iterable[Waiter]:
        rank, number = message.fields
        if number >= self.number:
            self._here.setdefault(number, set()).add(rank)
            self._gave_up.discard(rank)

        return self._moved()

    def _leave(self, peer: int, message: Message) -> Iterable[Waiter]:
        rank, number = message.fields
        if number >= self.number:
            self._here.setdefault(number, set()).discard(rank)
            self._gave_up.add(rank)

        return ()

    def _moved(self) -> list[Waiter]:
        woken: list[Waiter] = []
        # Own ranks that have not come back to a gate keep it shut: its number is the same for all of them.
        while len(self.standing()) == self._presence.world_size:
            self._opens = True
            woken += self.on_opening()
            del self._here[self.number]
            self.number += 1
            through, self._waiters = self._waiters, {}
            self._gave_up.clear()
            for waiter in through.values():
                waiter.done = True
                woken.append(waiter)

            self._opens = False

        return woken + list(self.on_coming())

    def _missing(self) -> list[int]:
        here = self.standing()
        return [rank for rank in range(self._presence.world_size) if rank not in here]

    def _why_shut(self, rank: int) -> Failure | None:
        what, missing = f"{self.name}()", self._missing()
        failure = self._presence.lacks(rank, missing, what)
        others = self._elsewhere()
        elsewhere = [other for other in missing if other in others]
        if failure is None and elsewhere:
            text = f"{self._presence.me(rank)}, {what}: {rank_list(elsewhere)} called reset() instead"
            return lambda: AbortedError(text)

        return failure
