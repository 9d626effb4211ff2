"""Orders work between CUDA streams by events, for backends. A CPU tensor needs none: its event is None.

Nothing here waits on the host, except where a name says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtorch_core._copies import bare, cloned, copy_into
from dtorch_core._events import recorded

DEFAULT = 0
"""What :func:`raw_current` gives for the default stream: of a GPU's streams, all threads have this one in common."""


def _raw_current(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_current: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_current)
"""CUDA's own name for this thread's current stream of a GPU. Asked by every call, so it is no function of Python.

Names of two streams may be equal if they are of two GPUs, or if one has been destroyed before the other was made. To
make torch's object for the stream takes as long as a kernel's launch; this does not.
"""


def record_default(device: int) -> torch.cuda.Event:
    """An event that completes when all work queued so far on a GPU's default stream has."""
    return recorded(torch.cuda.default_stream(device))


def record(tensor: Tensor, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
    """An event that completes when all work queued so far on ``stream`` has; None for a CPU tensor.

    :param stream: the current stream of the tensor's device where None.
    """
    if not tensor.is_cuda:
        return None

    return recorded(stream if stream is not None else torch.cuda.current_stream(tensor.device))


def order_after(event: torch.cuda.Event | None, tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
    """Make ``stream`` (the current one of the tensor's device where None) wait for ``event``. The host goes on."""
    if event is not None:
        (stream if stream is not None else torch.cuda.current_stream(tensor.device)).wait_event(event)


def keep_until_done(tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
    """Tell the allocator that ``stream`` uses the tensor: its memory is not handed out before that work is done."""
    if tensor.is_cuda:
        # Of a conjugate or negative view torch would make a copy, tell the allocator of that one's memory, and free the
        # copy twice (seen with torch 2.11: the heap is damaged, and the process dies later and elsewhere).
        memory = bare(tensor)
        memory.record_stream(stream if stream is not None else torch.cuda.current_stream(tensor.device))


def copy_to_device(
    tensor: Tensor, device: torch.device | str, stream: torch.cuda.Stream | None = None
) -> tuple[Tensor, torch.cuda.Event | None]:
    """An owned copy on ``device``, queued on ``stream``, and the event after which it holds its values.

    A CPU source has been read when this returns. A CPU copy is pinned, and is valid only once the event is done.
    """
    target = torch.device(device)
    if not tensor.is_cuda and target.type == "cpu":
        return cloned(tensor), None

    if not tensor.is_cuda:
        return _upload(tensor, target, stream)

    queue = stream if stream is not None else torch.cuda.current_stream(tensor.device)
    if target.type == "cpu":
        return _download(tensor, queue)

    return _across(tensor, torch.device("cuda", queue.device.index) if target.index is None else target, queue)


def _across(tensor: Tensor, target: torch.device, queue: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
    # torch queues a copy to another GPU on the current stream of the tensor's, and then on the target's. The tensor's
    # may be that of another rank, whose kernels wait for what this rank does next: on a stream of its own, then.
    side = queue if queue.device == tensor.device else torch.cuda.Stream(tensor.device)
    if side is not queue:
        side.wait_stream(queue)

    with torch.cuda.stream(queue), torch.cuda.stream(side):
        keep_until_done(tensor, side)
        copy = cloned(tensor) if target == tensor.device else tensor.to(target, non_blocking=True)
        event = recorded(side)

    if side is not queue:
        queue.wait_event(event)

    return copy, event


def _download(tensor: Tensor, queue: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
    # Only a stream of the tensor's own device can queue this copy; one of another device waits before and after.
    side = queue if queue.device == tensor.device else torch.cuda.Stream(tensor.device)
    if side is not queue:
        side.wait_stream(queue)

    with torch.cuda.stream(side):
        keep_until_done(tensor, side)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        copy_into(copy, tensor, non_blocking=True)
        event = recorded(side, blocking=True)

    if side is not queue:
        queue.wait_event(event)

    return copy, event


def _upload(
    tensor: Tensor, target: torch.device, stream: torch.cuda.Stream | None
) -> tuple[Tensor, torch.cuda.Event | None]:
    queue = torch.cuda.current_stream(target)
    if stream is not None and stream.device == queue.device:
        queue = stream

    # Through pinned memory of our own: the source may be rewritten while the transfer still runs. The caching host
    # allocator keeps the staging memory until the stream has read it.
    staging = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy_into(staging, tensor)
    with torch.cuda.stream(queue):
        copy = staging.to(target, non_blocking=True)
        event = recorded(queue)

    if stream is not None and stream is not queue:  # of another GPU
        stream.wait_event(event)

    return copy, event


def host_wait(event: torch.cuda.Event | None) -> None:
    """Block this thread until ``event`` is done. The GIL is released meanwhile."""
    if event is not None:
        event.synchronize()
