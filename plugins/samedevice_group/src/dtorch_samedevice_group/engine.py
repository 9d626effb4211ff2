"""Turns a collective call into joint work on a store: numbers it, fingerprints it, and compares the fingerprints.

A fingerprint is the first line of an offer's note. The second one, where there is one, is the call as a person would
write it; what follows is data that may differ between the ranks.

Each rank counts its calls. Calls with one number meet under one key; if their fingerprints differ, every rank raises
CollectiveMismatchError with a table of who called what, and the group stays usable: all raised at one number.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from dtorch_core import CollectiveMismatchError, TensorStore
from dtorch_core._groups.fingerprints import compare
from dtorch_core._text import describe_error
from dtorch_core.declared import Declared, Result, Shapes
from dtorch_core.joint import Offer, Ticket
from dtorch_samedevice_group.aside import Aside
from dtorch_samedevice_group.blocks import Task
from dtorch_samedevice_group.collectives import Collective, nothing

MOST = 1000
"""Calls on streams aside that a barrier still orders."""


class Engine:
    """One rank's side of the group's calls."""

    def __init__(self, store: TensorStore, name: str, *, aside: bool = False) -> None:
        """
        :param aside: async collectives are put on a stream of their own here; not where the store has one for them.
        """
        self.store = store
        self.rank = store.rank
        self.world_size = store.world_size
        self._name = name
        self._numbers = itertools.count(1)
        self.number = 0
        """That of the call that this rank has begun last."""
        self._second = _Second()
        self._aside = Aside() if aside else None
        self._begun: deque[Ticket] = deque(maxlen=MOST)

    def post(
        self, note: str, tensors: Sequence[Tensor], work: Collective, stream: torch.cuda.Stream | None = None
    ) -> Ticket:
        """Post one collective; ``note`` begins with its fingerprint, as a person would write the call."""
        key = self._second.key
        if key is None:
            self.number = number = next(self._numbers)
            key = f"collective #{number}"

        return self.store.post(key, note, tensors, _Compared(self._name, key, work), stream=stream)

    def post_aside(self, note: str, tensors: Sequence[Tensor], work: Collective) -> Ticket:
        """As :meth:`post`, beside what this rank computes from now on: see :mod:`dtorch_samedevice_group.aside`."""
        if self._aside is None or not tensors or not tensors[0].is_cuda:
            return self.post(note, tensors, work)

        stream = self._aside.here(tensors[0].get_device())
        ticket = self.post(note, tensors, work, stream)
        if stream is not None:
            self._begun.append(ticket)

        return ticket

    def begun(self) -> Sequence[Ticket]:
        """What was put on streams aside since this was last asked."""
        begun, self._begun = self._begun, deque(maxlen=MOST)
        return list(begun)  # another thread may be about to append to it

    def post_note(self, same: str, call: str, text: str) -> tuple[Ticket, AbstractContextManager[None]]:
        """Give every rank this rank's text, which may differ.

        What is posted under the context is the second part of this call: it has its number, whatever was called
        meanwhile, and a rank that raises in the first part misses no number.
        """
        self.number = number = next(self._numbers)
        key = f"collective #{number}"
        ticket = self.store.post(key, f"{same}\n{call}\n{text}", (), _Compared(self._name, key, nothing()))
        return ticket, self._second_part(f"{key}, second part")

    def refuse(self, call: str, error: Exception) -> None:
        """This rank's call is wrong by itself. Its peers learn so at once, instead of waiting for it."""
        self.post(f"{call}: raised {describe_error(error)}", (), nothing())

    @contextmanager
    def _second_part(self, key: str) -> Iterator[None]:
        before, self._second.key = self._second.key, key  # a call that begins meanwhile may begin another one
        try:
            yield
        finally:
            self._second.key = before


class _Second(threading.local):
    """What this thread is at the second part of."""

    key: str | None = None


class _Compared(Declared):
    """One collective, of calls that have to mean the same."""

    __slots__ = ("_collective", "_group", "_key")

    def __init__(self, group: str, key: str, collective: Collective) -> None:
        self._group = group
        self._key = key
        self._collective = collective

    def __call__(self, offers: Sequence[Offer]) -> Sequence[Task]:
        first = offers[0].note
        for offer in offers:
            if offer.note != first:
                self._compare([offer.note for offer in offers])
                break

        try:
            return self._collective.work(offers)
        except CollectiveMismatchError as misfit:
            raise self._told(misfit, first) from None

    def results(self, notes: Sequence[str], shapes: Shapes) -> Sequence[Result]:
        if len(set(notes)) > 1:
            self._compare(notes)

        try:
            return self._collective.results(shapes)
        except CollectiveMismatchError as misfit:
            raise self._told(misfit, notes[0]) from None

    def _compare(self, notes: Sequence[str]) -> None:
        compare(f"group {self._group!r}, {self._key}", notes)

    def _told(self, misfit: CollectiveMismatchError, note: str) -> CollectiveMismatchError:
        call = note.partition("\n")[0]
        return CollectiveMismatchError(f"group {self._group!r}, {self._key}, {call}: {misfit}")
