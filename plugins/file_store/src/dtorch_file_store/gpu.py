"""What this process has of CUDA for a session: memory that others map, theirs mapped here, and streams in order.

A point of a stream is a mark that streams of other processes can wait for. All of it comes to be with the first tensor.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtorch_core import AbortedError, PeerLostError, Topology, UnsupportedOperationError, UnsupportedTensorError
from dtorch_core._text import rank_list
from dtorch_file_store import reach
from dtorch_file_store.arena import Arena
from dtorch_file_store.cuda.copies import Copies
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import Driver, DriverError, driver
from dtorch_file_store.cuda.exports import Exports
from dtorch_file_store.cuda.imports import Imports
from dtorch_file_store.cuda.signals import Mark, OwnSignals, PeerSignals
from dtorch_file_store.link import LOST, lost
from dtorch_file_store.node import Node
from dtorch_file_store.waiting import Waiter
from dtorch_file_store.wire import Message, frame

Said = bytes
"""A ticket as it travels."""

Finish = torch.cuda.Event | torch.cuda.Stream | tuple[int, Sequence[int] | None]
"""Where somebody was: on a stream of this process, or of another node, by its mark. Without a mark it has done all."""

UUID_DIGITS = 32

_TOGETHER = -1
"""In place of a device's number."""

SWEEP = 0.01
"""Seconds between two looks for memory that was freed: each costs a microsecond for each allocation."""

LOOKING = 400e-6
"""Seconds that a thread looks for messages before it sleeps: a peer's answer takes as long, since its calls of CUDA
come before it. (Measured on an H200: to be woken adds 40 us to an exchange of 390 us.)"""

_left: list[object] = []
"""Tensors that others may read when the session here is closed. Nobody can say any more when they have."""


class Here(NamedTuple):
    """What comes to be with the first tensor."""

    calls: Driver
    devices: Devices
    own: OwnSignals
    exports: Exports
    imports: Imports


class Gpu:
    """One node's side."""

    def __init__(self, node: Node, arena: Arena, topology: Topology) -> None:
        self.node = node
        self.arena = arena
        self.shared = len(node.own_ranks) > 1
        """Several ranks of this process."""
        self._topology = topology
        self._mutex = threading.Lock()
        """Held while something comes to be, and inside it the node's mutex may be taken; never the other way round."""
        self._here: Here | None = None
        self._closed = False
        self._copies: dict[int, Copies] = {}
        self._peers: dict[int, int | PeerSignals] = {}
        self._sides: dict[int, torch.cuda.Stream] = {}
        self._reasons: dict[int, str | None] = {}
        self._next_sweep = 0.0
        node.handlers["signals"] = self._on_signals
        node.handlers["freed"] = self._on_freed

    def here(self) -> Here:
        """What this process has. Begins it, and tells the others.

        :raises DriverError: if CUDA's driver can't be used here.
        :raises AbortedError: if this is closed.
        """
        if self._here is None:
            with self._mutex:
                self._check_open()
                if self._here is None:
                    calls = driver()
                    devices = Devices(calls)
                    own = OwnSignals(calls)
                    with self.node.mutex:
                        self.node.tell_all(frame("signals"), fd=own.fd)

                    self._here = Here(calls, devices, own, Exports(calls, devices), Imports(calls, devices))

            self.node.look_longer(LOOKING)
            self.node.send()

        assert self._here is not None
        return self._here

    # Devices

    def uuid(self, device: torch.device) -> str:
        """A device by the name that processes share: its UUID, or its number where the driver can't be asked."""
        assert device.index is not None
        try:
            return self.here().devices.uuids[device.index]
        except DriverError:
            return str(device.index)

    def device_of(self, uuid: str) -> torch.device:
        """A device by the name that processes share; where this process does not see it, its current one."""
        ordinal = int(uuid) if len(uuid) < UUID_DIGITS else self.here().devices.ordinal(uuid)
        return torch.device("cuda", torch.cuda.current_device() if ordinal is None else ordinal)

    def why_host(self, device: torch.device) -> str | None:
        """Why other processes can't map memory of a device; None if all can."""
        assert device.index is not None
        if device.index not in self._reasons:
            self._reasons[device.index] = reach.why_host(self._topology, [self.uuid(device)])

        return self._reasons[device.index]

    def why_host_together(self) -> str | None:
        """Why the ranks can't all map what the others have on their devices; None if they can. The same on each."""
        if _TOGETHER not in self._reasons:
            homes = [member.facts.get(reach.HOME, "") for member in self._topology]
            self._reasons[_TOGETHER] = reach.why_host(self._topology, homes)

        return self._reasons[_TOGETHER]

    # This process's memory

    def offer(self, tensor: Tensor, queue: torch.cuda.Stream) -> tuple[Said, Tensor | None]:
        """How others map a tensor, and the copy that it is of, if its own memory can't be mapped."""
        exports = self.here().exports
        try:
            return exports.offer(tensor), None
        except UnsupportedTensorError:
            copy = self.copies(tensor.device).copy(tensor, queue)
            return exports.offer(copy), copy

    def copies(self, device: torch.device) -> Copies:
        """Memory of a device that can be mapped."""
        assert device.index is not None
        with self._mutex:
            if device.index not in self._copies:
                self._copies[device.index] = Copies(driver(), device.index)

            return self._copies[device.index]

    def tell_freed(self) -> None:
        """Tell the others what this process has freed, so that they let go of it too."""
        now = time.monotonic()
        if now < self._next_sweep:
            return

        self._next_sweep = now + SWEEP
        gone = self.here().exports.gone()
        if gone:
            with self.node.mutex:
                self.node.tell_all(frame("freed", gone), lazily=True)

    def leave(self, tensors: Iterable[object]) -> None:
        """Others may read these when the session here is closed: they are kept until this process ends."""
        _left.extend(tensors)

    # The others' memory

    def tensor(self, home: int, said: Said) -> Tensor:
        """The tensor that a node offers.

        :raises PeerLostError: if it can't be mapped, and its process is gone.
        """
        try:
            return self.here().imports.offered(home, said)
        except UnsupportedOperationError as error:
            if home not in self.node.gone:
                raise UnsupportedOperationError(
                    f"{self._who(home)} offers a tensor of its memory, and {error}; {reach.VARIABLE}=0 in the "
                    f"environment of all ranks sends values through host memory"
                ) from error

            raise PeerLostError(f"{self._who(home)} is gone, and its memory with it ({error}); open it anew") from error

    # The order of streams

    def mark(self, queue: torch.cuda.Stream) -> list[int] | None:
        """A mark behind all that a stream was given so far, to be told only now; None if it has done all of it."""
        mark = self.here().own.mark(queue)
        return None if mark is None else list(mark)

    def order(self, queue: torch.cuda.Stream, finishes: Iterable[Finish]) -> None:
        """Make a stream wait for points of others. The host goes on."""
        for finish in finishes:
            if isinstance(finish, tuple):
                home, mark = finish
                if mark is not None:
                    self.peer(home).wait(Mark(*mark), queue)
            elif isinstance(finish, torch.cuda.Event):
                queue.wait_event(finish)
            elif finish is not queue:
                queue.wait_stream(finish)

    def check_alive(self, home: int, mark: Sequence[int] | None) -> None:
        """:raises PeerLostError: if a node died before its stream had written what the mark stands for."""
        if mark is not None and home in self.node.gone and not self.peer(home).happened(Mark.from_json(mark)):
            raise PeerLostError(f"{self._who(home)} died before its stream had written this tensor; open it anew")

    def peer(self, home: int) -> PeerSignals:
        """A node's signals."""
        found = self._peers[home]
        if isinstance(found, PeerSignals):
            return found

        with self._mutex:
            self._check_open()
            found = self._peers[home]
            if found == LOST:
                raise lost(self.node.presence.label, "a peer's signals")

            if isinstance(found, int):
                found = self._peers[home] = PeerSignals(driver(), found)
                if home in self.node.gone:
                    found.release()

            return found

    def side(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of the store's own, for what no stream of the user's is at hand for."""
        assert device.index is not None
        with self._mutex:
            if device.index not in self._sides:
                self._sides[device.index] = torch.cuda.Stream(device)

            return self._sides[device.index]

    def _who(self, home: int) -> str:
        presence, ranks = self.node.presence, self.node.ranks_at(home)
        return f"{presence.label}: {rank_list(ranks)} (pid {presence.pids[ranks[0]]})"

    # Ends

    def release(self, node: int) -> None:
        """A node is gone: no stream of this process waits for it any more. Takes no lock that is held across a call of
        CUDA's, since such a call may be blocked until this is done."""
        found = self._peers.get(node)
        if isinstance(found, PeerSignals):
            found.release()

    def node_gone(self, node: int) -> None:
        """A node has ended, in whatever way. Under the node's mutex, so what takes long is left to a job."""
        self.release(node)
        self.node.jobs.append(lambda: self._forget(node))

    def close(self) -> None:
        """No more tensors. Waits until this process's streams are where others wait for them, if they still do."""
        with self._mutex, self.node.mutex:
            self._closed = True
            here, copies = self._here, list(self._copies.values())

        if here is not None:
            if not self.node.presence.died:
                here.own.finish()  # if one dies meanwhile, it is released

            here.own.close()
            here.imports.close()

        for node in self._peers:
            peer, self._peers[node] = self._peers[node], LOST  # who is interrupted comes again
            if isinstance(peer, PeerSignals):
                peer.close()
            elif peer != LOST:
                os.close(peer)

        for each in copies:
            each.close()

    def _check_open(self) -> None:
        if self._closed:
            raise AbortedError(f"{self.node.presence.label}: it is closed; open it anew")

    def _forget(self, node: int) -> None:
        if self._here is not None:
            self._here.imports.forget(node)

    def _on_signals(self, peer: int, message: Message) -> Iterable[Waiter]:
        fd = self.node.links[peer].take_fd()
        if not self._closed:
            self._peers[peer] = fd
        elif fd != LOST:
            os.close(fd)

        return ()

    def _on_freed(self, peer: int, message: Message) -> Iterable[Waiter]:
        (numbers,) = message.fields
        if self._here is not None:
            self._here.imports.gone(peer, numbers)

        return ()
