"""Gives back mappings, pages and memory that nobody uses, in a thread of its own.

CUDA gives them back only when the whole device is idle: the call blocks until everything that this process has queued
on it is done, and also while a stream waits for another process. Meanwhile no other thread can launch a kernel. So the
thread first waits until all that was queued is done, which holds up nobody, and the call itself has little left to
wait for.

The thread lives as long as there is something to give back one day. It is told through a queue that finalizers may
write to, in whatever thread and moment they run.
"""

from __future__ import annotations

import contextlib
import queue
import threading

from dtorch_file_store.cuda.driver import Driver, DriverError


class Holding:
    """Something of a device's that is given back once it is condemned and unused."""

    def __init__(self, calls: Driver, ordinal: int) -> None:
        self._driver = calls
        self.ordinal = ordinal
        self._condemned = False
        self._janitor: Janitor | None = None

    def condemn(self) -> None:
        """It will get no new user. Never blocks."""
        self._condemned = True
        self.look()

    def look(self) -> None:
        """A user has gone. Never blocks, takes no lock."""
        if self._condemned and self._janitor is not None:
            self._janitor.told.put(self)

    def unused(self) -> bool:
        """No user is left. Of one that is condemned this is final."""
        return True

    def give_back(self) -> None:
        """Called once, in the device's context. May block until the device is idle."""
        raise NotImplementedError


class Janitor:
    """The thread."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Holding | threading.Event] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._held: set[Holding] = set()
        """Also keeps them: memory that the device knows must not be unmapped by mere forgetting."""

    def hold(self, holding: Holding) -> None:
        """It has to be given back one day."""
        holding._janitor = self
        with self._mutex:
            self._held.add(holding)
            if len(self._held) == 1:
                threading.Thread(target=self._run, name="dtorch-cuda-janitor", daemon=True).start()

        holding.look()

    @property
    def held(self) -> int:
        """How many have not been given back."""
        return len(self._held)

    def settle(self, timeout: float) -> bool:
        """Wait until all is given back that is condemned and unused; False if that took longer than ``timeout``."""
        marker = threading.Event()
        with self._mutex:
            if not self._held:
                return True

            self.told.put(marker)

        return marker.wait(timeout)

    def _run(self) -> None:
        while True:
            told = self.told.get()
            if isinstance(told, threading.Event):
                told.set()
            elif told._janitor is self and told.unused():
                told._janitor = None
                self._give_back(told)
                with self._mutex:
                    self._held.discard(told)
                    if not self._held:
                        self._leave()
                        return

    def _give_back(self, holding: Holding) -> None:
        calls = holding._driver
        with contextlib.suppress(DriverError), calls.on(holding.ordinal):  # CUDA is lost, or shut down: so is all of it
            with contextlib.suppress(DriverError):
                calls.synchronize()

            holding.give_back()

    def _leave(self) -> None:
        while not self.told.empty():
            told = self.told.get()
            if isinstance(told, threading.Event):
                told.set()


JANITOR = Janitor()
"""The one of this process."""
