"""What is published under a key: here as a tensor, in other processes as bytes that they map or are sent."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtorch_core._copies import cloned, copy_into, plain
from dtorch_core._memory import own_bytes
from dtorch_file_store.arena import Arena, Mapping
from dtorch_file_store.tensors import Layout, compact, over, read, read_back, write
from dtorch_file_store.wire import INLINE_BYTES


class Value(ABC):
    """A published tensor, as this process has it."""

    body: bytes = b""
    """What travels with its description."""
    settles: bool = False
    """:meth:`settle` or :meth:`abandon` has something to do."""
    marks: bool = False
    """Whoever finishes says where its stream is, by :meth:`mark`."""

    @abstractmethod
    def describe(self) -> Any:  # noqa: ANN401 - plain values
        """What another node needs to make its own value of it."""

    @abstractmethod
    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        """The tensor, for one consumer of this process: an object of its own; on CUDA ordered on ``stream``."""

    def mark(self, stream: torch.cuda.Stream | None) -> Any:  # noqa: ANN401 - an event, or plain values
        """Where a consumer of this process is when it finishes; for :meth:`settle`, perhaps in another process."""
        return None

    def drain(self, stream: torch.cuda.Stream | None) -> None:  # noqa: B027
        """Wait, on the host, until a consumer's work is done: in place of a mark for which there is no stream."""

    def published(self) -> None:  # noqa: B027 - few have something to do
        """The others know of it: what the producer has to do that none of them waits for."""

    def finished(self) -> None:  # noqa: B027 - few have something to do
        """All consumers have finished. Under the node's mutex: calls no torch."""

    def settle(self, marks: Sequence[Any], stream: torch.cuda.Stream | None) -> None:  # noqa: B027
        """After the producer's wait: what consumers wrote reaches its tensor, and ``stream`` goes on behind them."""

    def abandon(self, marks: Sequence[Any]) -> None:  # noqa: B027
        """Instead of :meth:`settle`: nobody waits for it."""


class OwnValue(Value):
    """A CPU tensor of this process. Ranks of this process get the tensor itself: of its storage, its own bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = own_bytes(tensor)

    def describe(self) -> Any:  # noqa: ANN401
        return None  # there is no other node

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        return self._tensor.detach()


class SentValue(OwnValue):
    """A small one, which rides in the message."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._layout = compact(tensor)
        self.body = to_bytes(tensor, self._layout)

    def describe(self) -> Any:  # noqa: ANN401
        return "body", self._layout.to_json()


class SharedValue(OwnValue):
    """One in shared memory: the tensor lies there, or a copy of it does."""

    def __init__(self, tensor: Tensor, arena: Arena, writable: bool) -> None:
        """:raises NoRoomError: if there is no shared memory for a copy."""
        super().__init__(tensor)
        lies = None if tensor.is_conj() or tensor.is_neg() else arena.locate(tensor)
        self._written: Tensor | None = None
        """The producer's own tensor, where consumers write into a copy of it."""
        if lies is not None:
            self._block, offset = lies
            self._block.retain()
            self._layout = Layout.of_view(tensor)
        else:
            self._layout = compact(tensor)
            self._block, offset = arena.allocate(self._layout.nbytes), 0
            write(tensor, self._layout, self._block.bytes())
            if writable:
                self._written, self.settles = tensor, True
                self._tensor = read(self._layout, self._block.bytes())

        self._offset = self._block.offset + offset

    def describe(self) -> Any:  # noqa: ANN401
        return "block", self._block.segment, self._offset, self._layout.to_json()

    def finished(self) -> None:
        if self._written is None:
            self._block.release()

    def settle(self, marks: Sequence[Any], stream: torch.cuda.Stream | None) -> None:
        if self._written is not None:
            read_back(self._layout, self._block.bytes(), self._written)
            self._block.release()
            self._written = None

    def abandon(self, marks: Sequence[Any]) -> None:
        if self._written is not None:
            self._block.release()
            self._written = None


class ArrivedValue(Value):
    """A small tensor that another node has sent."""

    def __init__(self, layout: Layout, body: bytes) -> None:
        self._layout, self.body = layout, body

    def describe(self) -> Any:  # noqa: ANN401
        raise AssertionError("its producer's node describes it")

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        return from_bytes(self._layout, self.body)


class MappedValue(Value):
    """A tensor in the shared memory of another node."""

    def __init__(self, layout: Layout, offset: int, mapping: Callable[[], Mapping]) -> None:
        """
        :param mapping: of the segment; mapped by the first consumer.
        """
        self._layout, self._offset, self._mapping = layout, offset, mapping

    def describe(self) -> Any:  # noqa: ANN401
        raise AssertionError("its producer's node describes it")

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        return read(self._layout, self._mapping().bytes(self._offset, self._layout.nbytes))


def own_value(tensor: Tensor, arena: Arena, *, shared: bool, writable: bool) -> Value:
    """How to publish a CPU tensor.

    :param shared: there are other nodes.
    """
    if not shared:
        return OwnValue(tensor)

    if (tensor.nbytes > INLINE_BYTES or writable) and tensor.numel():
        return SharedValue(tensor, arena, writable)

    return SentValue(tensor)


def message_value(tensor: Tensor, arena: Arena, *, near: bool) -> Value:
    """A copy of a CPU tensor, for one receiver.

    :param near: it is a rank of this process, which gets the copy itself.
    """
    if near:
        return OwnValue(cloned(tensor, torch.contiguous_format))

    if tensor.nbytes <= INLINE_BYTES:
        return SentValue(plain(tensor))

    copy = arena.empty(tensor.shape, tensor.dtype)
    copy_into(copy, tensor)
    return SharedValue(copy, arena, writable=False)


def to_bytes(tensor: Tensor, layout: Layout) -> bytes:
    """The bytes of a tensor as ``layout`` stores them."""
    if not layout.nbytes:
        return b""

    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return ctypes.string_at(tensor.data_ptr(), layout.nbytes)

    buffer = bytearray(layout.nbytes)
    write(tensor, layout, torch.frombuffer(buffer, dtype=torch.uint8))
    return bytes(buffer)


def from_bytes(layout: Layout, body: bytes) -> Tensor:
    """A tensor of its own."""
    return over(layout, bytearray(body))
