"""This process's CUDA tensors, for others to map."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from dtorch_core.errors import UnsupportedTensorError
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import Allocation, Driver, DriverError
from dtorch_file_store.cuda.imports import foreign
from dtorch_file_store.cuda.ticket import Ticket, this_process
from dtorch_file_store.tensors import Layout

_MOST = 1000
"""Tensors whose tickets are remembered."""


@dataclass(slots=True, frozen=True)
class _Export:
    """An allocation that was offered, or was found not to be one that can be."""

    number: int
    buffer: int
    handle: str
    refusal: str


class Exports:
    """Makes tickets. Thread-safe.

    A ticket holds nothing. Whoever publishes keeps the tensor until every consumer has finished, and until its memory
    can be given away without a race. torch's allocator gives a freed block at once to later work on the stream that the
    tensor was *made* on, which may be another than the one that waited for the consumers. So the reference is dropped
    when

    - the producer's stream waits for the consumers' signals (:meth:`PeerSignals.wait`), if any had still to come, and
    - ``streams.keep_until_done(tensor, stream)`` has told the allocator that this stream uses the tensor.

    The allocator then notes, when the last reference goes, where that stream stands, which is behind the waits, and
    keeps the block until the stream got there. No host waits. Where no stream of the user's is at hand (a tensor that
    nobody waits for is given up), a stream of the store's own does the same. A consumer that died holds nothing back,
    but what it had queued may still touch the memory until its process is gone.
    """

    def __init__(self, calls: Driver, devices: Devices) -> None:
        self._driver = calls
        self._devices = devices
        self._mutex = threading.Lock()
        self._exports: dict[int, _Export] = {}
        """By the address that the allocation begins at."""
        self._next = 1
        self._gone: list[int] = []
        self._known: dict[tuple[object, ...], tuple[int, bytes]] = {}
        """By a tensor's place and layout: its allocation's buffer, and its ticket as it travels."""

    def ticket(self, tensor: Tensor) -> Ticket:
        """What another process needs to use the tensor's memory. The handle is asked for once per allocation.

        :raises UnsupportedTensorError: if the memory can't be shared: the message is the reason alone. Its values can
            still be copied, to memory that can be, or through the host.
        """
        if not tensor.is_cuda:
            raise UnsupportedTensorError(f"a tensor on {tensor.device} has no CUDA memory")

        layout = Layout.of_view(tensor)
        conjugate, negative = tensor.is_conj(), tensor.is_neg()
        if layout.nbytes == 0:
            uuid = self._devices.uuids[tensor.get_device()]
            return Ticket(this_process(), uuid, 0, "", 0, layout, conjugate, negative)

        address = tensor.data_ptr()
        found = self._driver.allocation(address)
        with self._mutex:
            export = self._exports.get(found.base)
            if export is None or export.buffer != found.buffer:  # a freed allocation's address can come again
                export = self._export(found)

        offset = address - found.base
        if export.refusal:
            raise UnsupportedTensorError(export.refusal)

        if offset + layout.nbytes > found.size:
            raise UnsupportedTensorError("the tensor lies in several allocations at once")

        uuid = self._devices.uuids[found.ordinal]
        return Ticket(this_process(), uuid, export.number, export.handle, offset, layout, conjugate, negative)

    def offer(self, tensor: Tensor) -> bytes:
        """As :meth:`ticket`, as it travels. Programs offer the same tensors again and again: that is quick."""
        address = tensor.data_ptr()
        place = address, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        known = self._known.get(place)
        if known is not None and self._driver.buffer(address) == known[0]:
            return known[1]

        ticket = self.ticket(tensor)
        said = ticket.pack()
        if ticket.allocation:
            if len(self._known) >= _MOST:
                self._known.clear()

            self._known[place] = self._driver.buffer(address), said

        return said

    def gone(self) -> list[int]:
        """Numbers of allocations that were offered and have been freed, each said once: tell the peers.

        What they have mapped is held by them until then. Costs a microsecond for each allocation that was offered; an
        allocation is freed by ``torch.cuda.empty_cache()``, or when memory is short.
        """
        with self._mutex:
            for base, export in list(self._exports.items()):
                if self._driver.buffer(base) != export.buffer:
                    self._retire(base)

            gone, self._gone = self._gone, []
            return gone

    def _export(self, found: Allocation) -> _Export:
        self._retire(found.base)
        handle, refusal = b"", _refusal(found)
        if not refusal:
            try:
                with self._driver.on(found.ordinal):
                    handle = self._driver.ipc_handle(found.base)
            except DriverError as error:
                refusal = f"its memory can't be shared between processes: {error}"

        export = _Export(self._next, found.buffer, handle.hex(), refusal)
        if found.buffer:
            self._next += 1
            self._exports[found.base] = export

        return export

    def _retire(self, base: int) -> None:
        export = self._exports.pop(base, None)
        if export is not None and export.handle:
            self._gone.append(export.number)


def _refusal(found: Allocation) -> str:
    if not found.buffer:
        return "its memory is not the CUDA driver's: it was freed, or is simulated"

    if foreign[found.base]:
        return "its memory is another process's; only the process that made it can offer it"

    if not found.exportable:
        return (
            "its memory has no interprocess handle: it is part of an expandable segment (PYTORCH_ALLOC_CONF) or of a "
            "memory pool of the driver"
        )

    return ""
