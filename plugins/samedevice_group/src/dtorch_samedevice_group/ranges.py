"""What torch's profiler sees of a call: a range, named as Gloo's are, from the call until it has been waited for.

Of a call whose caller goes on meanwhile it ends when that does, and the wait is a range of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dtorch_samedevice_group.options import is_waited_for
from dtorch_samedevice_group.unreal import tensors_in
from dtorch_samedevice_group.work import GroupWork, Waited

profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler is on in this thread. Asked by every call, so it is no function of Python."""

_NAMES = {
    "allreduce": "all_reduce",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "gather_single": "gather",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather_parts": "sparse_all_reduce",
    "recv_anysource": "recvAnySource",
}
"""Of methods; the others are called as Gloo's ranges."""


class Range:
    """Begins when it is entered, or before that."""

    def __init__(self, label: str, given: Any = ()) -> None:  # noqa: ANN401 - what c10d's methods take
        tensors = [tensor for tensor in tensors_in(given) if type(tensor) is Tensor]
        self._record = torch._C._profiler._RecordFunctionFast(label, tensors)
        self._begun = False

    def begin(self) -> Range:
        self._record.__enter__()
        self._begun = True
        return self

    def __enter__(self) -> Range:
        return self if self._begun else self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record.__exit__(None, None, None)


def label_of(method: str) -> str:
    return f"samedevice:{_NAMES.get(method, method)}"


def recorded(name: str, call: Callable[..., Waited]) -> Callable[..., Waited]:
    """The c10d method ``call``, called ``name``, in a range."""
    label = label_of(name)

    def method(*args: Any, **named: Any) -> Waited:  # noqa: ANN401
        span = Range(label, args[1:]).begin()
        try:
            work = call(*args, **named)
        except BaseException:
            span.__exit__(None, None, None)
            raise

        if not isinstance(work, GroupWork):
            span.__exit__(None, None, None)
        elif is_waited_for((*args[1:], *named.values())):
            work.range = span
        else:
            span.__exit__(None, None, None)
            work.range = Range(f"{label}.wait")

        return work

    return method
