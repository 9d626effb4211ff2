"""torch's ShardedTensor, in which FSDP1 gives sharded state, on groups of this project.

Where it gathers, it asks by the name of a group's backend for the device of its buffers, and takes any that it does
not know to be on a GPU.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from dtorch_core._groups import torch_state
from dtorch_core._thread_ranks.when_imported import when_imported

_HOME = "torch.distributed._shard.sharded_tensor.api"
_lock = threading.Lock()
_adapted = False


def adapt() -> None:
    """From now on, in the whole process: as soon as it is imported."""
    global _adapted
    with _lock:
        first, _adapted = not _adapted, True

    if first:
        when_imported(_HOME, _ask_the_group)


def _ask_the_group() -> None:
    kind = getattr(sys.modules[_HOME], "ShardedTensor", None)
    original = getattr(kind, "_get_preferred_device", None)
    if original is None:
        torch_state.miss(f"{_HOME} has no ShardedTensor._get_preferred_device: gather() fails for groups on the CPU")
        return

    @functools.wraps(original)
    def preferred(self: Any) -> torch.device:  # noqa: ANN401
        group: Any = self._process_group or dist.group.WORLD
        if torch_state.is_ours(group) and {device.type for device in group._device_types} == {"cpu"}:
            return torch.device("cpu")

        return original(self)  # type: ignore[no-any-return]

    kind._get_preferred_device = preferred  # type: ignore[union-attr]
