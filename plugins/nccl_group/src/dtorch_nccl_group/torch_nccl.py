"""torch's ProcessGroupNCCL: the one place that knows it. Whoever has the same functions can take its place."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from dtorch_nccl_group.environment import Environment

DEVICE_TYPE = "cuda"
KIND = dist.ProcessGroup.BackendType.NCCL
QUEUED = True
"""A call returns when its kernel is queued, and is not over then."""

SETTINGS = {
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"): "2",  # clean up, and do not end the process
    ("TORCH_NCCL_ENABLE_MONITORING",): "0",  # nor because the watchdog is slow
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "0",  # nor after writing a dump
    ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",): "0",  # and end the kernel at once, not four times so much later
}
"""What torch reads from the environment when a group is made, where the user has not set it."""

WITHOUT_RECORDER: Mapping[tuple[str, ...], str] = {("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "0"}
"""Read once, with the first group of the process: torch's flight recorder is off."""

_environment = Environment(SETTINGS)


def version() -> str:
    """The version of the NCCL that this torch has, as ``"2.28.9"``; empty where it has none."""
    if not dist.is_available() or not dist.is_nccl_available():
        return ""

    found = torch.cuda.nccl.version()
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def recorder_takes_one_rank() -> bool:
    """Before torch 2.12 the flight recorder looks a group up in a map, and adds it, without a lock.

    Ranks that are threads make the first calls of their groups at the same time, and the process crashes.
    """
    return TorchVersion(torch.__version__) < "2.12"


def backend(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: float,
    name: str,
    *,
    shared: bool,
) -> Any:  # noqa: ANN401
    """A ProcessGroupNCCL that never ends the process.

    :param shared: the process may have other ranks too.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    options.global_ranks_in_group = list(range(world_size))
    options.group_name = name  # type: ignore[assignment]  # a str under another name
    first = WITHOUT_RECORDER if shared and recorder_takes_one_rank() else None
    return _environment.made(lambda: dist.ProcessGroupNCCL(store, rank, world_size, options), first)


def connect(made: Any, device: torch.device, timeout: float) -> None:  # noqa: ANN401
    """Make the communicator, on this device: what comes later finds it, and never guesses the device.

    Not by c10d's eager connection, after which messages of torch.distributed would be queued behind all else.
    """
    opts = dist.AllreduceOptions()
    opts.timeout = timedelta(seconds=timeout)
    with torch.cuda.device(device):
        made.allreduce([torch.zeros(1, device=device)], opts).wait(timedelta(seconds=timeout))


def limit(made: Any, timeout: float) -> None:  # noqa: ANN401
    """How long kernels may take that are begun from now on. Of a call's own options NCCL's group reads no timeout."""
    made._set_default_timeout(timedelta(seconds=timeout))


def finish(device: torch.device) -> None:
    """Wait on the host until all that is queued on the device is over."""
    torch.cuda.synchronize(device)
