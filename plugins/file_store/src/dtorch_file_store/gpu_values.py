"""CUDA tensors that are published: mapped where they are by the other processes, with their streams in order.

Ranks of one process hand each other the tensor and order their streams by events. For another process the tensor is a
ticket. Where memory can't be mapped, the values go through host memory, and a message says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtorch_core import AbortedError, UnsupportedOperationError, streams
from dtorch_core._copies import copy_into
from dtorch_file_store.cuda.current import current, on
from dtorch_file_store.cuda.signals import Mark
from dtorch_file_store.gpu import Gpu, Said
from dtorch_file_store.values import Value, own_value


def publish(gpu: Gpu, tensor: Tensor, stream: torch.cuda.Stream | None, *, writable: bool) -> Value:
    """How to publish a CUDA tensor.

    :raises UnsupportedOperationError: if consumers are to write into it, and it would go through host memory.
    """
    queue = stream if stream is not None else current(tensor.get_device())
    if not gpu.node.links:
        return NearValue(tensor, queue)

    reason = gpu.why_host(tensor.device)
    if reason is None:
        return OfferedValue(gpu, tensor, queue, writable=writable)

    if writable:
        raise UnsupportedOperationError(
            f"{gpu.node.presence.label}: writable=True needs memory that all processes map, and here values go "
            f"through host memory: {reason}"
        )

    return HostedValue(gpu, tensor, queue)


def publish_to_host(gpu: Gpu, tensor: Tensor, stream: torch.cuda.Stream | None) -> Value:
    """How to publish the values of a CUDA tensor to consumers that want them on the CPU."""
    queue = stream if stream is not None else current(tensor.get_device())
    if not gpu.node.links:
        copy, ready = streams.copy_to_device(tensor, "cpu", queue)
        return NearValue(copy, queue, ready)

    if gpu.why_host(tensor.device) is None:
        return OfferedValue(gpu, tensor, queue, writable=False, to_host=True)

    copy, ready = streams.copy_to_device(tensor, "cpu", queue)
    streams.host_wait(ready)
    return own_value(copy, gpu.arena, shared=True, writable=False)


def message(gpu: Gpu, tensor: Tensor, stream: torch.cuda.Stream | None, *, near: bool) -> Value:
    """A copy of a CUDA tensor, for one receiver.

    :param near: it is a rank of this process, which gets the copy itself.
    """
    with on(stream):
        copy = tensor.clone(memory_format=torch.contiguous_format)

    if near:
        return NearValue(copy, stream if stream is not None else current(copy.get_device()))

    return publish(gpu, copy, stream, writable=False)


class NearValue(Value):
    """A CUDA tensor, or one on its way from there to the CPU, for ranks of this process."""

    settles = True
    marks = True

    def __init__(self, tensor: Tensor, queue: torch.cuda.Stream, ready: torch.cuda.Event | None = None) -> None:
        self._tensor = tensor
        self._queue = queue
        self._ready = ready if ready is not None else queue.record_event()

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
        queue = stream if stream is not None else current(self._queue.device_index)
        for event in marks:
            queue.wait_event(event)


class OfferedValue(Value):
    """A CUDA tensor that other processes map."""

    settles = True
    marks = True

    def __init__(
        self, gpu: Gpu, tensor: Tensor, queue: torch.cuda.Stream, *, writable: bool, to_host: bool = False
    ) -> None:
        """
        :param to_host: consumers want it on the CPU; each brings it there, so that nobody waits here.
        """
        self._gpu = gpu
        self._queue = queue
        self._writable = writable
        self._to_host = to_host
        gpu.tell_freed()
        self._original = tensor
        self._said, self._copy = gpu.offer(tensor, queue)
        self._tensor = tensor if self._copy is None else self._copy
        self._ready = queue.record_event() if gpu.shared else None
        """For ranks of this process; a single one takes its own tensor back by a later point of its stream."""
        self._mark = gpu.mark(queue)
        self._user: torch.cuda.Stream | None = None
        """The stream that the allocator knows to use the tensor."""

    def published(self) -> None:
        # As good as after the wait: the allocator looks where the stream is when the last reference goes.
        streams.keep_until_done(self._original, self._queue)
        self._user = self._queue

    def describe(self) -> Any:  # noqa: ANN401
        return "cuda", self._said, self._mark, self._to_host

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        ready = self._ready if self._ready is not None else self._queue.record_event()
        if self._to_host:
            return _downloaded(self._gpu, self._tensor, ready)

        streams.order_after(ready, self._tensor, stream)
        streams.keep_until_done(self._original, stream)
        return self._tensor.detach()

    def mark(self, stream: torch.cuda.Stream | None) -> Any:  # noqa: ANN401
        return None if self._to_host else streams.record(self._tensor, stream)

    def settle(self, marks: Sequence[Any], stream: torch.cuda.Stream | None) -> None:
        if not marks and self._copy is None:
            return  # when they finished they had done all that they had to do

        queue = stream if stream is not None else current(self._queue.device_index)
        self._gpu.order(queue, marks)
        if self._copy is not None:
            if self._writable:
                with on(queue):
                    copy_into(self._original, self._copy)

            self._gpu.copies(self._copy.device).give_back(self._copy, queue)

        # The memory may be handed out anew once this stream is past the consumers' work.
        if queue is not self._user:
            streams.keep_until_done(self._original, queue)

    def abandon(self, marks: Sequence[Any]) -> None:
        self._writable = False
        try:
            self.settle(marks, self._gpu.side(self._original.device))
        except AbortedError:  # closed meanwhile: nobody can say when they have read it
            self._gpu.leave([self])


class HostedValue(Value):
    """A CUDA tensor whose values go through host memory, since it can't be mapped everywhere."""

    def __init__(self, gpu: Gpu, tensor: Tensor, queue: torch.cuda.Stream) -> None:
        copy, done = streams.copy_to_device(tensor, "cpu", queue)
        streams.host_wait(done)
        self._device = tensor.device
        self._uuid = gpu.uuid(tensor.device)
        self._memory = own_value(copy, gpu.arena, shared=True, writable=False)
        self.body = self._memory.body

    def describe(self) -> Any:  # noqa: ANN401
        return "host", self._uuid, self._memory.describe()

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        return _uploaded(self._memory.borrow(None), self._device, stream)

    def finished(self) -> None:
        self._memory.finished()


class MappedGpuValue(Value):
    """A CUDA tensor of another process."""

    marks = True

    def __init__(self, gpu: Gpu, home: int, said: Said, mark: Sequence[int] | None, to_host: bool) -> None:
        """
        :param to_host: its consumers want it on the CPU.
        """
        self._gpu, self._home, self._said, self._mark, self._to_host = gpu, home, said, mark, to_host
        self._ordinal = -1
        """The device; once somebody has it."""

    def describe(self) -> Any:  # noqa: ANN401
        raise AssertionError("its producer's node describes it")

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        gpu, home = self._gpu, self._home
        gpu.check_alive(home, self._mark)
        tensor = gpu.tensor(home, self._said)
        self._ordinal = tensor.get_device()
        if not self._to_host:
            if self._mark is not None:
                queue = stream if stream is not None else current(self._ordinal)
                gpu.peer(home).wait(Mark(*self._mark), queue)

            return tensor

        side = gpu.side(tensor.device)
        gpu.order(side, [(home, self._mark)])
        copy = _downloaded(gpu, tensor, None)
        gpu.check_alive(home, self._mark)  # the copy waited for it, or was let go
        return copy

    def mark(self, stream: torch.cuda.Stream | None) -> Any:  # noqa: ANN401
        if self._to_host:
            return None  # its own copy is done

        return self._gpu.mark(stream if stream is not None else current(self._ordinal))

    def drain(self, stream: torch.cuda.Stream | None) -> None:
        (stream if stream is not None else current(self._ordinal)).synchronize()


class UploadedValue(Value):
    """A CUDA tensor of another process, which comes through host memory: a copy for each consumer."""

    def __init__(self, gpu: Gpu, uuid: str, memory: Value) -> None:
        self._gpu, self._uuid, self._memory = gpu, uuid, memory

    def describe(self) -> Any:  # noqa: ANN401
        raise AssertionError("its producer's node describes it")

    def borrow(self, stream: torch.cuda.Stream | None) -> Tensor:
        return _uploaded(self._memory.borrow(None), self._gpu.device_of(self._uuid), stream)


def _downloaded(gpu: Gpu, tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
    """A copy on the CPU. What the caller's stream has queued is no business of it."""
    side = gpu.side(tensor.device)
    if ready is not None:
        side.wait_event(ready)

    copy, done = streams.copy_to_device(tensor, "cpu", side)
    streams.host_wait(done)
    return copy


def _uploaded(tensor: Tensor, device: torch.device, stream: torch.cuda.Stream | None) -> Tensor:
    copy, ready = streams.copy_to_device(tensor, device, stream)
    streams.order_after(ready, copy, stream)
    return copy
