"""all_reduce of sparse tensors: DDP calls it for the gradients of sparse embeddings.

The ranks' tensors have values at different places. First they tell each other how many; then indices and values are
gathered, and every rank adds them up alike.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dtorch_core import (
    CollectiveMismatchError,
    StoreTimeoutError,
    UnsupportedOperationError,
    UnsupportedTensorError,
    streams,
)
from dtorch_core._shapes import describe
from dtorch_core.joint import Ticket, copy_of
from dtorch_samedevice_group.aside import on
from dtorch_samedevice_group.options import Options
from dtorch_samedevice_group.work import Waited


class Parts(NamedTuple):
    """What the second round is given: room for each rank's part, and this rank's own."""

    indices: Sequence[Tensor]
    values: Sequence[Tensor]
    own_indices: Tensor
    own_values: Tensor


class Group(Protocol):
    """What is needed of the process group."""

    def size(self) -> int: ...

    def post_notes(self, same: str, call: str, text: str) -> tuple[Ticket, AbstractContextManager[None]]: ...

    def gather_parts(self, parts: Parts) -> Waited: ...


def is_sparse(tensors: object) -> bool:
    """The first argument of an all_reduce is about sparse tensors."""
    listed = [tensors] if isinstance(tensors, Tensor) else tensors
    return isinstance(listed, (list, tuple)) and any(
        isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo for tensor in listed
    )


def checked(tensors: Sequence[Tensor], options: Options) -> Tensor:
    """The tensor to reduce.

    :raises UnsupportedTensorError: if it is not one sparse tensor alone.
    :raises UnsupportedOperationError: if the op is not a sum: a place that holds no value has none to compare.
    """
    if len(tensors) != 1 or tensors[0].layout is not torch.sparse_coo:
        raise UnsupportedTensorError(f"all_reduce takes one sparse tensor, alone, not {len(tensors)} tensors")

    if options.op not in ("sum", "avg"):
        raise UnsupportedOperationError(f"all_reduce of sparse tensors knows sum and avg, not {options.op_text}")

    return tensors[0]


class SparseWork(Waited):
    """Both rounds. The second one begins when the first is done, waited for or not: the peers need it."""

    def __init__(self, group: Group, tensor: Tensor, op: str, timeout: float) -> None:
        super().__init__([tensor], timeout)
        self._group, self._tensor, self._op = group, tensor, op
        self._own = tensor.detach().coalesce()
        self._streams = [torch.cuda.current_stream(tensor.device)] if tensor.is_cuda else []
        """This rank's: the second round is begun in any thread."""
        self._lock = threading.Lock()
        self._begins = False
        self._begun = threading.Event()
        """The second round has begun, or can't."""
        self._second: Waited | None = None
        self._parts: Parts | None = None
        self._error: Exception | None = None
        self._finished = False
        self._added: torch.cuda.Event | None = None
        same = f"all_reduce(sparse {tensor.dtype} {list(tensor.shape)}, {op})"
        text = json.dumps([self._own._nnz(), tensor.sparse_dim()])
        self._first, self._place = group.post_notes(same, same, text)
        self._first.add_done_callback(self._go_on)

    def is_completed(self) -> bool:
        if not self._first.done():
            return False

        self._go_on()
        return self._begun.is_set() and (self._second is None or self._second.is_completed())

    def _go_on(self) -> None:
        """Begin the second round, unless it was. No lock is held meanwhile: posting may do other calls' work."""
        with self._lock:
            if self._begins:
                return

            self._begins = True

        try:
            self._first.wait(0)
            with self._place, on(self._streams):
                self._parts = self._room(self._first.notes())
                self._second = self._group.gather_parts(self._parts)
        except Exception as error:
            self._error = error
        finally:
            self._begun.set()

    def _room(self, notes: Sequence[str]) -> Parts:
        told = [json.loads(note.split("\n", 2)[2]) for note in notes]
        if len({dims for _, dims in told}) > 1:
            dims = ", ".join(f"rank {rank}: {dims}" for rank, (_, dims) in enumerate(told))
            raise CollectiveMismatchError(f"all_reduce({describe(self._tensor)}): sparse dims differ: {dims}")

        indices, values = self._own.indices(), self._own.values()
        return Parts(
            [indices.new_empty(indices.shape[0], count) for count, _ in told],
            [values.new_empty(count, *values.shape[1:]) for count, _ in told],
            indices,
            values,
        )

    def _end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._first.wait(timeout)
        self._go_on()
        if not self._begun.wait(max(deadline - time.monotonic(), 1.0)):  # another thread is at it, and waits for nobody
            raise StoreTimeoutError("the counts are here, but this call's second round has not begun in time")

        if self._error is not None:
            raise copy_of(self._error)

        assert self._second is not None and self._parts is not None, "begun, or failed"
        self._second._end(max(deadline - time.monotonic(), 0))
        with self._lock:
            if not self._finished:
                self._add_up(self._parts)
                self._added = streams.record(self._tensor)
                self._finished = True
            else:
                streams.order_after(self._added, self._tensor)  # this thread's stream may be another one

    def _add_up(self, parts: Parts) -> None:
        with torch.no_grad():
            for part in (*parts.indices, *parts.values):
                streams.keep_until_done(part)  # made on the stream of the call, and read on that of who waits

            indices, values = torch.cat(list(parts.indices), 1), torch.cat(list(parts.values))
            # The places are good: they come from tensors of the same shape.
            added = torch.sparse_coo_tensor(indices, values, self._tensor.shape, check_invariants=False)
            whole = added.coalesce()
            self._tensor.copy_(whole / self._group.size() if self._op == "avg" else whole)
