"""Other processes' CUDA tensors, mapped here."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dtorch_core.errors import AbortedError, ProtocolError, UnsupportedOperationError
from dtorch_file_store.cuda.borrowed import bytes_at
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import Driver, DriverError
from dtorch_file_store.cuda.janitor import JANITOR, Holding
from dtorch_file_store.cuda.ticket import Ticket, this_process

foreign: Counter[int] = Counter()
"""How many mappings of this process begin at an address: such memory can't be offered again."""

_MOST = 1000
"""Tensors that are remembered."""

_mutex = threading.Lock()
_numbers = itertools.count()


class _Mapping(Holding):
    """One allocation of another process, opened here."""

    def __init__(self, calls: Driver, handle: bytes, ordinal: int) -> None:
        super().__init__(calls, ordinal)
        self._users: set[int] = set()
        # In the context of the memory's own device: torch's kernels there find it as they find their own.
        with calls.on(ordinal):
            self.address = calls.ipc_open(handle)

        with _mutex:
            foreign[self.address] += 1

    def take(self) -> int:
        """One more user: its number."""
        number = next(_numbers)
        self._users.add(number)
        return number

    def drop(self, number: int) -> None:
        """A user has gone. Called by finalizers, anywhere: takes no lock."""
        self._users.discard(number)
        self.look()

    def unused(self) -> bool:
        return not self._users

    def give_back(self) -> None:
        with _mutex:
            foreign[self.address] -= 1
            if not foreign[self.address]:
                del foreign[self.address]

        self._driver.ipc_close(self.address)


class _Opening:
    """An allocation that somebody asked for, mapped or about to be."""

    __slots__ = ("mapping", "mutex", "over")

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        """Held by who opens it."""
        self.mapping: _Mapping | None = None
        self.over = False
        """Nobody will ask for it again."""


class Imports:
    """Maps tickets, each allocation once. Thread-safe.

    A mapping is kept while its owner keeps the allocation, whether a tensor uses it or not: opening costs a third of a
    millisecond, and closing waits for the device, in the janitor's thread. Memory stays readable when its owner has
    exited or was killed, and it stays mapped while a tensor over it lives, whatever is told here: a kernel that reads
    unmapped memory would end CUDA in this process.

    Tensors over it are torch's in all but one thing: ``record_stream`` does nothing for them. Who lets go of one says
    so to its owner by a signal on the stream that used it last.
    """

    def __init__(self, calls: Driver, devices: Devices) -> None:
        self._driver = calls
        self._devices = devices
        self._mutex = threading.Lock()
        self._openings: dict[tuple[int, int], _Opening] = {}
        """By peer, and its number for the allocation."""
        self._known: dict[tuple[int, bytes], tuple[Tensor, int]] = {}
        """Tensors over memory that is still offered, and its allocation's number; by peer and ticket."""
        self._closed = False

    def tensor(self, peer: int, ticket: Ticket) -> Tensor:
        """The tensor that a peer offers: its very memory, on the device where it is. Its storage spans its bytes.

        :raises ProtocolError: if the memory is this process's own: use the tensor itself.
        :raises UnsupportedOperationError: if it can't be reached from here; the message is the reason alone. The values
            can still come through the host.
        :raises UnsupportedTensorError: if this torch has no such dtype.
        :raises AbortedError: if this was closed.
        """
        if ticket.owner == this_process():
            raise ProtocolError("a process can't map its own memory: hand on the tensor itself")

        ordinal = self._devices.ordinal(ticket.device)
        if ordinal is None:
            raise UnsupportedOperationError(self._devices.reaches(ticket.device) or "its device is not here")

        if ticket.layout.nbytes == 0:
            return ticket.over(torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", ordinal)))

        mapping, number = self._take(peer, ticket, ordinal)
        memory = bytes_at(mapping.address + ticket.offset, ticket.layout.nbytes, ordinal)
        weakref.finalize(memory.untyped_storage(), mapping.drop, number).atexit = False
        return ticket.over(memory)

    def offered(self, peer: int, said: bytes) -> Tensor:
        """As :meth:`tensor`, for a ticket as it travels. To be offered the same again is quick: that is an alias.

        :raises DtorchError: as :meth:`tensor` does.
        """
        known = self._known.get((peer, said))
        if known is None:
            ticket = Ticket.unpack(said)
            with torch.inference_mode(False):  # the next one may be asked for in another mode
                known = self.tensor(peer, ticket), ticket.allocation

            with self._mutex:
                if (peer, ticket.allocation) in self._openings:
                    if len(self._known) >= _MOST:
                        self._known.clear()

                    self._known[peer, said] = known

        return known[0].detach()

    def gone(self, peer: int, allocations: Iterable[int]) -> None:
        """A peer has freed allocations that it offered (:meth:`Exports.gone` there). Never blocks."""
        with self._mutex:
            self._condemn([(peer, number) for number in allocations])

    def forget(self, peer: int) -> None:
        """A peer has left, or died: nothing of it will be asked for. Never blocks."""
        with self._mutex:
            self._condemn([key for key in self._openings if key[0] == peer])

    def close(self) -> None:
        """Nothing will be asked for. Tensors still alive keep their memory. Never blocks."""
        with self._mutex:
            self._closed = True
            self._condemn(list(self._openings))

    def _take(self, peer: int, ticket: Ticket, ordinal: int) -> tuple[_Mapping, int]:
        key = peer, ticket.allocation
        while True:
            with self._mutex:
                if self._closed:
                    raise AbortedError("no tensor can be mapped: this process has closed its side")

                opening = self._openings.setdefault(key, _Opening())
                if opening.mapping is not None:
                    return opening.mapping, opening.mapping.take()

            # Not under the mutex: the driver can be blocked until a dead peer is released.
            with opening.mutex:
                if opening.mapping is None:
                    mapping = self._open(ticket, ordinal)
                    number = mapping.take()
                    with self._mutex:
                        opening.mapping = mapping
                        if opening.over:
                            mapping.condemn()

                    return mapping, number

    def _open(self, ticket: Ticket, ordinal: int) -> _Mapping:
        try:
            mapping = _Mapping(self._driver, bytes.fromhex(ticket.handle), ordinal)
        except DriverError as error:
            raise UnsupportedOperationError(f"its memory can't be mapped here: {error}") from error

        JANITOR.hold(mapping)
        return mapping

    def _condemn(self, keys: Sequence[tuple[int, int]]) -> None:
        ended = set(keys)
        for known in [known for known, (_, number) in self._known.items() if (known[0], number) in ended]:
            del self._known[known]

        for key in keys:
            opening = self._openings.pop(key, None)
            if opening is not None:
                opening.over = True
                if opening.mapping is not None:
                    opening.mapping.condemn()
