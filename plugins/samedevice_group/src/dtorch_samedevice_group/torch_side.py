"""What torch asks a process group besides collectives: who it is, what it can do, where it belongs.

c10d splits this between a process group and the backends that it has for each device type. This group is both.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from dtorch_core import BackendContext
from dtorch_samedevice_group.work import AllOf, Waited


class TorchSide:
    """Mixed into the process group, before torch's class."""

    # A backend that splits is asked in C++; dist.split_group asks this group another way (torch_state in the core).
    supports_splitting = False
    # It does, and gains nothing: batch_isend_irecv gives one Work for each message then, as on Gloo.
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False  # its name up to torch 2.14, and since
    supports_tensor_alloc = False
    supports_shrinking = False
    options: Any = None
    bound_device_id: torch.device | None = None

    def __init__(self, ctx: BackendContext) -> None:
        self._rank, self._size, self._name, self._device = ctx.rank, ctx.world_size, ctx.name, ctx.device
        self._group_name, self._group_desc = ctx.name, ""
        self._timeout = ctx.timeout
        self._ctx = ctx
        self._splits = itertools.count()
        self._coalesced: list[Waited] | None = None
        """The Works since ``_start_coalescing``."""

    def getBackendName(self) -> str:
        return "samedevice"

    name = getBackendName

    def _get_backend_name(self) -> str:
        """By this one ShardedTensor decides whether the group is on the CPU: it knows Gloo alone."""
        return "gloo" if torch.device(self._device).type == "cpu" else self.getBackendName()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def get_group_store(self) -> Store:
        return self._ctx.rendezvous

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def count_split(self) -> int:
        """The number of a split of this group, equal on every rank."""
        return next(self._splits)

    # As a backend

    @property
    def _device_types(self) -> list[torch.device]:
        """What its tensors may be on. The CPU is among them, so objects travel there."""
        return [torch.device(kind) for kind in dict.fromkeys(("cpu", torch.device(self._device).type))]

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ANN401 - not a C++ one, but what is asked of it
        if device.type not in {known.type for known in self._device_types}:
            raise RuntimeError(f"group {self._name!r}: its ranks are on {self._device}; no backend for {device.type}")

        return self

    def _set_sequence_number_for_group(self) -> None:
        """Calls are numbered as it is."""

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """The ranks are connected since the group was made."""

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> AllOf:
        """One Work for all calls since the start. They have begun as they came: nothing here needs them together."""
        works, self._coalesced = self._coalesced or [], None
        return AllOf(works, self._timeout)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # called from C++ since torch 2.14
