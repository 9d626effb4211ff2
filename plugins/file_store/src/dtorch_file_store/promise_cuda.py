"""CUDA values that a holder sets for a promise of another process.

The holder's work goes on at once: a thread of the value's own waits until the value is computed, and only then offers
its memory. So what a killed holder never computed is never offered, and no stream waits for another process. The maker
copies it, on the device, and says so; until then the holder keeps the memory, and its process does not end.
Memory that can't be shared, and small values, come through the host.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dtorch_core.errors import BrokenPromiseError, DtorchError, UnsupportedOperationError
from dtorch_core.future import Outcome
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import Driver, driver
from dtorch_file_store.cuda.exports import Exports
from dtorch_file_store.cuda.imports import Imports
from dtorch_file_store.cuda.ticket import Ticket
from dtorch_file_store.promise_line import Line
from dtorch_file_store.promise_packets import ANSWER, limit_waits, pack, pack_value, parse, receive, send, unpack
from dtorch_file_store.tensors import compact, read, write
from dtorch_file_store.wire import INLINE_BYTES, Message, frame

KINDS = frozenset({"cuda", "staged"})
"""Messages that are for :class:`Arrival`."""


class Gpu(NamedTuple):
    """What this process has of CUDA."""

    calls: Driver
    devices: Devices
    exports: Exports

    def uuid(self, tensor: Tensor) -> str:
        """Of the device that a tensor is on."""
        return self.devices.uuids[tensor.get_device()]

    def offer(self, tensor: Tensor) -> Ticket:
        """For the maker's process. :raises UnsupportedTensorError: if the memory can't be shared."""
        self.exports.gone()  # a promise's maker keeps no mapping: only what is noted here has to go
        return self.exports.ticket(tensor)

    def copy_of(self, ticket: Ticket) -> Outcome:
        """A copy, complete, of what another process offers.

        :raises DtorchError: if its memory can't be reached from here.
        """
        imports = Imports(self.calls, self.devices)
        try:
            theirs = imports.tensor(0, ticket)
            with torch.cuda.stream(_stream(theirs.get_device())):
                layout = compact(theirs)
                memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=theirs.device)
                write(theirs, layout, memory)
                ready = _done()

            return Outcome(read(layout, memory), ready)
        finally:
            imports.close()

    def upload(self, uuid: str, staged: Tensor) -> Outcome:
        """A copy on the device, complete, of a CPU tensor whose storage is its own.

        :raises UnsupportedOperationError: if this process does not see the device.
        """
        ordinal = self.devices.ordinal(uuid)
        if ordinal is None:
            raise UnsupportedOperationError(self.devices.reaches(uuid) or "its device is not here")

        layout = compact(staged)
        with torch.cuda.stream(_stream(ordinal)):
            bytes_here = staged.as_strided((staged.untyped_storage().nbytes() // staged.element_size(),), (1,))
            memory = bytes_here.view(torch.uint8).to(torch.device("cuda", ordinal))
            ready = _done()

        return Outcome(read(layout, memory), ready)

    def download(self, tensor: Tensor) -> Tensor:
        """A copy on the host of a value that is complete; its storage is its own."""
        layout = compact(tensor)
        with torch.cuda.stream(_stream(tensor.get_device())):
            memory = torch.empty(layout.nbytes, dtype=torch.uint8)
            write(tensor, layout, memory)

        return read(layout, memory)


@functools.cache
def gpu_here() -> Gpu:
    """The one of this process.

    :raises DriverError: if CUDA can't be used here.
    """
    calls = driver()
    devices = Devices(calls)
    return Gpu(calls, devices, Exports(calls, devices))


class Courier(threading.Thread):
    """Brings one value to the maker of its promise. No daemon: the process stays until the maker has copied it."""

    def __init__(self, label: str, line: Line, tensor: Tensor, ready: torch.cuda.Event) -> None:
        """
        :param line: nobody else's any more; closed at the end.
        """
        super().__init__(name=f"dtorch value of {label}")
        self._label, self._line, self._tensor, self._ready = label, line, tensor, ready
        self.detour = ""
        """Why the value goes through the host's memory; empty where it does not."""

    def begin(self) -> None:
        """Start; in this thread, where there can be no other."""
        try:
            self.start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        try:
            self._ready.synchronize()
            gpu = gpu_here()
            if not self._offered(gpu):
                self._stage(gpu)
        except Exception as error:
            failed = DtorchError(f"{self._label}: its value can't be brought from pid {os.getpid()}: {error}")
            self._send(pack(self._label, Outcome(error=failed)))
        finally:
            self._line.close()
            del self._tensor

    def _offered(self, gpu: Gpu) -> bool:
        """Whether all is done: the maker has its copy, or needs none."""
        if self._tensor.nbytes <= INLINE_BYTES:
            self.detour = f"it has {self._tensor.nbytes} bytes, which cost less in a message"
            return False

        try:
            ticket = gpu.offer(self._tensor)
        except DtorchError as error:
            self.detour = str(error)
            return False

        self._line.say(frame("cuda", ticket.to_json()))
        answer = self._line.answer(ANSWER)
        if answer is None or answer.kind != "stage":
            return True

        (self.detour,) = answer.fields
        return False

    def _stage(self, gpu: Gpu) -> None:
        uuid = gpu.uuid(self._tensor)
        self._send(pack_value(self._label, gpu.download(self._tensor), "staged", uuid))

    def _send(self, packed: tuple[bytes, int | None]) -> None:
        packet, fd = packed
        try:
            self._line.send(packet, fd)
        finally:
            if fd is not None:
                os.close(fd)


class Arrival(threading.Thread):
    """Takes one value in, at its promise's maker: mapping and copying may block, and the server must not."""

    def __init__(
        self,
        label: str,
        sock: socket.socket,
        pid: int,
        message: Message,
        fds: list[int],
        settle: Callable[[Outcome], None],
    ) -> None:
        """
        :param sock: to the holder, nobody else's any more; closed at the end, as ``fds`` are.
        :param pid: the holder's.
        :param settle: called once, in this thread.
        """
        super().__init__(name=f"dtorch value of {label}", daemon=True)
        self._label, self._socket, self._holder = label, sock, f"its holder, pid {pid}"
        self._message, self._fds, self._settle = message, fds, settle

    def begin(self) -> None:
        """Start; in this thread, where there can be no other."""
        try:
            self.start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        with self._socket:
            try:
                outcome = self._outcome()
            except Exception as error:
                why = f"{self._label}: what {self._holder}, sent can't be used here: {error}"
                outcome = Outcome(error=BrokenPromiseError(why))
            finally:
                for fd in self._fds:
                    os.close(fd)

        self._settle(outcome)

    def _outcome(self) -> Outcome:
        if self._message.kind == "cuda":
            try:
                outcome = gpu_here().copy_of(Ticket.from_json(self._message.fields[0]))
                self._say(frame("done"))
                return outcome
            except (DtorchError, RuntimeError) as error:  # torch's own are the latter
                self._say(frame("stage", str(error)[:4000]))
                self._hear()

        if self._message.kind != "staged":
            return unpack(self._message, self._fds, self._holder)

        kind, uuid, layout = self._message.fields
        staged = unpack(Message(kind, (layout,), self._message.body), self._fds, self._holder).tensor
        assert staged is not None, "a value"
        return gpu_here().upload(uuid, staged)

    def _say(self, packet: bytes) -> None:
        try:
            send(self._socket, packet)
        except ConnectionError:
            pass  # it is gone, which matters only to who waits for an answer

    def _hear(self) -> None:
        limit_waits(self._socket, ANSWER)
        received = receive(self._socket, 0)
        if received is None or not received[0]:
            raise DtorchError("it ended, or was stopped, before the value had come through the host")

        self._message, self._fds = parse(received[0]), received[1]


@functools.cache
def _stream(ordinal: int) -> torch.cuda.Stream:
    """The one on which values of a device are copied."""
    return torch.cuda.Stream(torch.device("cuda", ordinal))


def _done() -> torch.cuda.Event:
    """The current stream's event, once it is done. By it the future knows whose streams use the copy."""
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return event
