"""CUDA tensors of a session: mapped where they are by the other processes, with their streams in order.

Ranks of one process hand each other the tensor and order their streams by events. For another process the tensor is a
ticket, and a point of a stream is a mark that streams of other processes can wait for. Where memory can't be mapped,
the values go through host memory, and a message says why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtorch_core import PeerLostError, Topology, UnsupportedOperationError, UnsupportedTensorError, streams
from dtorch_core._text import rank_list
from dtorch_file_store.arena import Arena
from dtorch_file_store.cuda.copies import Copies
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import driver
from dtorch_file_store.cuda.exports import Exports
from dtorch_file_store.cuda.imports import Imports
from dtorch_file_store.cuda.signals import Mark, OwnSignals, PeerSignals
from dtorch_file_store.cuda.ticket import Ticket
from dtorch_file_store.node import Node
from dtorch_file_store.reach import REASON, SEEN
from dtorch_file_store.values import SharedValue, Value, own_value
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame

Finish = torch.cuda.Event | tuple[int, Sequence[int]]
"""Where a consumer was when it finished: on a stream of this process, or of another node."""


class Gpu:
    """This node's side. What it needs of CUDA comes to be with the first CUDA tensor."""

    def __init__(self, node: Node, arena: Arena, topology: Topology) -> None:
        self.node = node
        self.arena = arena
        self._topology = topology
        self._mutex = threading.Lock()
        self._own: OwnSignals | None = None
        self._exports: Exports | None = None
        self._imports: Imports | None = None
        self._devices: Devices | None = None
        self._copies: dict[int, Copies] = {}
        self._peers: dict[int, int | PeerSignals] = {}
        self._sides: dict[int, torch.cuda.Stream] = {}
        node.handlers["signals"] = self._on_signals
        node.handlers["freed"] = self._on_freed

    # Publishing

    def publish(self, tensor: Tensor, stream: torch.cuda.Stream | None, *, writable: bool) -> Value:
        """How to publish a CUDA tensor.

        :raises UnsupportedOperationError: if consumers are to write into it, and it would go through host memory.
        """
        queue = stream if stream is not None else torch.cuda.current_stream(tensor.device)
        if not self.node.links:
            return NearValue(tensor, queue)

        reason = self.why_host(tensor.device)
        if reason is None:
            return OfferedValue(self, tensor, queue, writable=writable)

        if writable:
            raise UnsupportedOperationError(
                f"{self.node.presence.label}: writable=True needs memory that all processes map, and here values go "
                f"through host memory: {reason}"
            )

        return HostedValue(self, tensor, queue)

    def publish_to_host(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> Value:
        """How to publish the values of a CUDA tensor to consumers that want them on the CPU."""
        queue = stream if stream is not None else torch.cuda.current_stream(tensor.device)
        if not self.node.links:
            copy, ready = streams.copy_to_device(tensor, "cpu", queue)
            return NearValue(copy, queue, ready)

        if self.why_host(tensor.device) is None:
            return OfferedValue(self, tensor, queue, writable=False, to_host=True)

        copy, ready = streams.copy_to_device(tensor, "cpu", queue)
        streams.host_wait(ready)
        return own_value(copy, self.arena, shared=True, writable=False)

    def message(self, tensor: Tensor, stream: torch.cuda.Stream | None, *, near: bool) -> Value:
        """A copy of a CUDA tensor, for one receiver.

        :param near: it is a rank of this process, which gets the copy itself.
        """
        with torch.cuda.stream(stream):
            copy = tensor.clone(memory_format=torch.contiguous_format)

        queue = stream if stream is not None else torch.cuda.current_stream(copy.device)
        return NearValue(copy, queue) if near else self.publish(copy, stream, writable=False)

    def why_host(self, device: torch.device) -> str | None:
        """Why another process can't map memory of a device; None if all can."""
        uuid = _uuid(torch.cuda.get_device_properties(device).uuid)
        for member in self._topology:
            if self.node.is_near(member.rank):
                continue

            reason = member.facts.get(REASON, f"rank {member.rank} is not on a CUDA device")
            if not reason and uuid not in member.facts.get(SEEN, "").split(","):
                reason = f"it does not see the device {uuid} (CUDA_VISIBLE_DEVICES)"

            if reason:
                return f"rank {member.rank}: {reason}"

        return None

    def ticket(self, tensor: Tensor, queue: torch.cuda.Stream) -> tuple[Ticket, Tensor | None]:
        """What other processes need to map a tensor, and the copy that it is of, if its own memory can't be mapped."""
        exports = self._begin()
        try:
            return exports.ticket(tensor), None
        except UnsupportedTensorError:
            copy = self.copies(tensor.device).copy(tensor, queue)
            return exports.ticket(copy), copy

    def tickets(self, tensors: Sequence[Tensor]) -> list[Any]:
        """How another process can map tensors that it is to write into.

        :raises UnsupportedOperationError: if it can't.
        """
        exports = self._begin()
        self.tell_freed()
        try:
            return [exports.ticket(tensor).to_json() for tensor in tensors]
        except UnsupportedTensorError as error:
            raise UnsupportedOperationError(
                f"{self.node.presence.label}: collectives of processes write into each other's tensors, and "
                f"a tensor of rank {self.node.own_ranks[0]} can't be mapped: {error}"
            ) from error

    def mapped(self, home: int, tickets: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors that a node has offered."""
        return tuple(self.tensor(home, Ticket.from_json(ticket)) for ticket in tickets)

    def keep_until(self, tensors: Sequence[Tensor], finishes: Iterable[Finish]) -> None:
        """Nobody waits for what is done to these tensors: their memory is not handed out before it is done."""
        if tensors:
            side = self.side(tensors[0].device)
            self.order(side, finishes)
            for tensor in tensors:
                streams.keep_until_done(tensor, side)

    def copies(self, device: torch.device) -> Copies:
        """Memory of a device that can be mapped."""
        assert device.index is not None
        with self._mutex:
            if device.index not in self._copies:
                self._copies[device.index] = Copies(driver(), device.index)

            return self._copies[device.index]

    def mark(self, queue: torch.cuda.Stream) -> Mark:
        """A mark behind all that a stream was given so far; to be told only now."""
        self._begin()
        assert self._own is not None
        return self._own.write(queue)

    def tell_freed(self) -> None:
        """Tell the others what this process has freed, so that they let go of it too."""
        if self._exports is not None:
            gone = self._exports.gone()
            if gone:
                with self.node.mutex:
                    self.node.tell_all(frame("freed", gone), lazily=True)

    # What others publish

    def tensor(self, home: int, ticket: Ticket) -> Tensor:
        """The tensor that a node offers."""
        self._begin()
        assert self._imports is not None
        return self._imports.tensor(home, ticket)

    def device_of(self, uuid: str) -> torch.device:
        """A device by the name that processes share; where this process does not see it, its current one."""
        self._begin()
        assert self._devices is not None
        ordinal = self._devices.ordinal(uuid)
        return torch.device("cuda", torch.cuda.current_device() if ordinal is None else ordinal)

    def order(self, queue: torch.cuda.Stream, finishes: Iterable[Finish]) -> None:
        """Make a stream wait for points of others. The host goes on."""
        for finish in finishes:
            if isinstance(finish, tuple):
                home, mark = finish
                self.peer(home).wait(Mark.from_json(mark), queue)
            else:
                queue.wait_event(finish)

    def check_alive(self, home: int, mark: Mark) -> None:
        """:raises PeerLostError: if a node died before its stream had written what the mark stands for."""
        peer = self.peer(home)
        if peer.released and not peer.happened(mark):
            presence, ranks = self.node.presence, self.node.ranks_at(home)
            raise PeerLostError(
                f"{presence.label}: {rank_list(ranks)} (pid {presence.pids[ranks[0]]}) died before its stream "
                f"had written this tensor; open {presence.label} anew"
            )

    def peer(self, home: int) -> PeerSignals:
        """A node's signals."""
        with self._mutex:
            found = self._peers[home]
            if isinstance(found, int):
                found = self._peers[home] = PeerSignals(driver(), found)
                if home in self.node.lost_nodes:
                    found.release()

            return found

    def side(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of the store's own, for what no stream of the user's is at hand for."""
        assert device.index is not None
        with self._mutex:
            if device.index not in self._sides:
                self._sides[device.index] = torch.cuda.Stream(device)

            return self._sides[device.index]

    # Ends

    def release(self, node: int) -> None:
        """A node's process is dead: no stream of this one waits for it any more. Makes no call of CUDA."""
        with self._mutex:
            found = self._peers.get(node)

        if isinstance(found, PeerSignals):
            found.release()

    def node_gone(self, node: int, died: bool) -> None:
        """A node has ended. Under the node's mutex, so what takes long is left to a job."""
        self.node.jobs.append(lambda: self._let_go_of(node, died))

    def close(self) -> None:
        """No more tensors. Waits until this process's streams are where others wait for them, if they still do."""
        with self._mutex:
            own, peers, copies = self._own, list(self._peers.values()), list(self._copies.values())
            self._own = None

        if own is not None:
            if not self.node.presence.died:
                own.finish()

            own.close()

        for peer in peers:
            if isinstance(peer, int):
                os.close(peer)
            else:
                peer.close()

        for each in copies:
            each.close()

        if self._imports is not None:
            self._imports.close()

    def _let_go_of(self, node: int, died: bool) -> None:
        if died:
            self.release(node)

        if self._imports is not None:
            self._imports.forget(node)

    def _begin(self) -> Exports:
        with self._mutex:
            if self._exports is None:
                calls = driver()
                self._devices = Devices(calls)
                self._imports = Imports(calls, self._devices)
                self._own = OwnSignals(calls)
                self._exports = Exports(calls, self._devices)
                with self.node.mutex:
                    self.node.tell_all(frame("signals"), fd=self._own.fd)

                self.node.after()

            return self._exports

    def _on_signals(self, peer: int, message: Message) -> Iterable[Waiter]:
        self._peers[peer] = self.node.links[peer].take_fd()
        return ()

    def _on_freed(self, peer: int, message: Message) -> Iterable[Waiter]:
        (numbers,) = message.fields
        if self._imports is not None:
            self._imports.gone(peer, numbers)

        return ()


class NearValue(Value):
    """A CUDA tensor, or one on its way from there to the CPU, for ranks of this process."""

    settles = True
    marks = True

    def __init__(self, tensor: Tensor, queue: torch.cuda.Stream, ready: torch.cuda.Event | None = None) -> None:
        self._tensor = tensor
        self._queue = queue
        if ready is None:
            ready = torch.cuda.Event()
            ready.record(queue)

        self._ready = ready

    def describe(self) -> Any:  # noqa: ANN401
        return None  # there is no other node

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        if self._tensor.is_cuda:
            streams.order_after(self._ready, self._tensor, stream)
            streams.keep_until_done(self._tensor, stream)
        else:
            streams.host_wait(self._ready)

        return self._tensor.detach()

    def mark(self, stream: torch.cuda.Stream | None) -> Any:  # noqa: ANN401
        return streams.record(self._tensor, stream)

    def settle(self, marks: Sequence[Any], stream: torch.cuda.Stream | None) -> None:
        queue = stream if stream is not None else torch.cuda.current_stream(self._queue.device)
        for event in marks:
            queue.wait_event(event)


class OfferedValue(NearValue):
    """A CUDA tensor that other processes map."""

    def __init__(
        self, gpu: Gpu, tensor: Tensor, queue: torch.cuda.Stream, *, writable: bool, to_host: bool = False
    ) -> None:
        """
        :param to_host: consumers want it on the CPU; each brings it there, so that nobody waits here.
        """
        self._gpu = gpu
        self._writable = writable
        self._to_host = to_host
        self._ticket, self._copy = gpu.ticket(tensor, queue)
        super().__init__(tensor if self._copy is None else self._copy, queue)
        self._original = tensor
        self._mark = gpu.mark(queue)
        gpu.tell_freed()

    def describe(self) -> Any:  # noqa: ANN401
        return "cuda", self._ticket.to_json(), list(self._mark), self._to_host

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        if not self._to_host:
            return super().borrow(stream)

        side = self._gpu.side(self._tensor.device)
        side.wait_event(self._ready)
        copy, done = streams.copy_to_device(self._tensor, "cpu", side)
        streams.host_wait(done)
        return copy

    def settle(self, marks: Sequence[Any], stream: torch.cuda.Stream | None) -> None:
        queue = stream if stream is not None else torch.cuda.current_stream(self._queue.device)
        self._gpu.order(queue, marks)
        if self._copy is not None:
            if self._writable:
                with torch.cuda.stream(queue):
                    self._original.copy_(self._copy)

            self._gpu.copies(self._copy.device).give_back(self._copy, queue)

        # The memory may be handed out anew once this stream is past the consumers' work.
        streams.keep_until_done(self._original, queue)

    def abandon(self, marks: Sequence[Any]) -> None:
        self._writable = False
        self.settle(marks, self._gpu.side(self._original.device))


class HostedValue(SharedValue):
    """A CUDA tensor whose values go through host memory, since it can't be mapped everywhere."""

    def __init__(self, gpu: Gpu, tensor: Tensor, queue: torch.cuda.Stream) -> None:
        self._gpu = gpu
        self._device = tensor.device
        copy, done = streams.copy_to_device(tensor, "cpu", queue)
        streams.host_wait(done)
        super().__init__(copy if copy.numel() else copy.clone(), gpu.arena, writable=False)

    def describe(self) -> Any:  # noqa: ANN401
        uuid = _uuid(torch.cuda.get_device_properties(self._device).uuid)
        return "host", uuid, list(super().describe()[1:])

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        return _uploaded(super().borrow(None), self._device, stream)


class MappedGpuValue(Value):
    """A CUDA tensor of another process."""

    marks = True

    def __init__(self, gpu: Gpu, home: int, ticket: Ticket, mark: Mark, *, to_host: bool = False) -> None:
        """
        :param to_host: its consumers want it on the CPU.
        """
        self._gpu, self._home, self._ticket, self._mark, self._to_host = gpu, home, ticket, mark, to_host

    def describe(self) -> Any:  # noqa: ANN401
        raise AssertionError("its producer's node describes it")

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        tensor = self._gpu.tensor(self._home, self._ticket)
        queue = stream if stream is not None else torch.cuda.current_stream(tensor.device)
        if self._to_host:
            queue = self._gpu.side(tensor.device)  # what the caller's stream has queued is no business of this copy

        self._gpu.check_alive(self._home, self._mark)
        self._gpu.order(queue, [(self._home, self._mark)])
        if not self._to_host:
            return tensor

        copy, done = streams.copy_to_device(tensor, "cpu", queue)
        streams.host_wait(done)
        return copy

    def mark(self, stream: torch.cuda.Stream | None) -> Any:  # noqa: ANN401
        device = self._gpu.device_of(self._ticket.device)
        if self._to_host:
            return None  # its own copy is done

        return list(self._gpu.mark(stream if stream is not None else torch.cuda.current_stream(device)))


class UploadedValue(Value):
    """A CUDA tensor of another process, which comes through host memory: a copy for each consumer."""

    def __init__(self, gpu: Gpu, uuid: str, memory: Value) -> None:
        self._gpu, self._uuid, self._memory = gpu, uuid, memory

    def describe(self) -> Any:  # noqa: ANN401
        raise AssertionError("its producer's node describes it")

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        return _uploaded(self._memory.borrow(None), self._gpu.device_of(self._uuid), stream)


def arrived(gpu: Gpu, home: int, ticket: Sequence[Any], mark: Sequence[Any], to_host: bool) -> Value:
    """The value that a node describes."""
    return MappedGpuValue(gpu, home, Ticket.from_json(ticket), Mark.from_json(mark), to_host=to_host)


def _uuid(uuid: object) -> str:
    """As :class:`Devices` writes it."""
    return str(uuid).replace("-", "").removeprefix("GPU").removeprefix("MIG")


def _uploaded(tensor: Tensor, device: torch.device, stream: torch.cuda.Stream | None) -> Tensor:
    copy, ready = streams.copy_to_device(tensor, device, stream)
    streams.order_after(ready, copy, stream)
    return copy
