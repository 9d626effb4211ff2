"""The c10d process group of ranks that share a device: checks a call, posts it, returns a Work.

Collectives have the names of torch 2.13 and the older ones; both are called, from Python and from C++. The short
forms of c10d's bindings work too: one tensor for a list of one, a ReduceOp or a root for the options.
"""

# c10d's options have no base class, and its bindings overload every method: we take the union of what they take.
# ruff: noqa: ANN401
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dtorch_core import BackendContext, UnsupportedTensorError
from dtorch_core.checks import check_tensor
from dtorch_core.joint import Ticket
from dtorch_core.reduction import Rule, rule
from dtorch_samedevice_group import collectives
from dtorch_samedevice_group.collectives import Collective
from dtorch_samedevice_group.engine import Engine, nothing
from dtorch_samedevice_group.work import GroupWork, ReceiveWork, SendWork, seconds_of, together

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


def open_process_group(ctx: BackendContext) -> dist.ProcessGroup:
    """The factory: a process group over a store that the core chooses for the same ranks."""
    return SameDeviceProcessGroup(ctx)


class SameDeviceProcessGroup(dist.ProcessGroup):
    """c10d's collectives as joint work on a TensorStore."""

    def __init__(self, ctx: BackendContext) -> None:
        super().__init__(ctx.rank, ctx.world_size)  # type: ignore[call-arg]  # torch's stub lacks this overload
        self._rank, self._size, self._name = ctx.rank, ctx.world_size, ctx.name
        self._timeout = ctx.timeout
        self._store = ctx.open_store("tensors")
        self._engine = Engine(self._store, ctx.name)

    # Who we are

    def getBackendName(self) -> str:
        return "samedevice"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    # What the core uses beside c10d's methods (dtorch_core._notes.SupportsNotes)

    def post_notes(self, call: str, text: str) -> Ticket:
        return self._engine.post_note(call, text)

    def reserve(self) -> AbstractContextManager[None]:
        return self._engine.reserve()

    def refuse(self, call: str, error: Exception) -> None:
        self._engine.refuse(call, error)

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """Wake every rank from every call of this group, now and later."""
        self._store.abort(reason or f"rank {self._rank} aborted the group {self._name!r}", died=died)

    def shutdown(self) -> None:
        self._store.close()

    # Collectives, each in the order (inputs and outputs) that dtorch_samedevice_group.collectives expects

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> GroupWork:
        tensors = _listed(tensors)

        def prepare(op: str, factor: float | None) -> Collective:
            return collectives.all_reduce(_rule(op, tensors), factor)

        return self._reduction("all_reduce", tensors, tensors, tensors, opts, prepare)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> GroupWork:
        tensors, root = _listed(tensors), _root(opts)

        def prepare(op: str, factor: float | None) -> Collective:
            return collectives.reduce(_rule(op, tensors), root, factor)

        written = tensors if self._rank == root else ()
        return self._reduction(f"reduce to rank {root}", tensors, tensors, written, opts, prepare)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> GroupWork:
        output, inputs = outputs[0], _nested(input_lists)

        def prepare(op: str, factor: float | None) -> Collective:
            self._one_for_each_rank("inputs", inputs)
            _fits("output", output, inputs[self._rank])
            return collectives.reduce_scatter(_rule(op, inputs), factor)

        return self._reduction("reduce_scatter", inputs, (output, *inputs), (output,), opts, prepare)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter([output], [self._parts(tensor, output)], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist._Work:
        return together([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def broadcast(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> GroupWork:
        tensors, root = _listed(tensors), _root(opts)
        call = f"broadcast({_shapes(tensors)}, src={root})"
        return self._post(call, tensors, tensors, opts, lambda: collectives.broadcast(root))

    def allgather(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        outputs, tensor = _nested(output_lists), _listed(inputs)[0]

        def prepare() -> Collective:
            self._one_for_each_rank("outputs", outputs)
            _fits("input", tensor, outputs[self._rank])
            return collectives.all_gather

        return self._post(f"all_gather({_shapes(outputs)})", (tensor, *outputs), outputs, opts, prepare)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist._Work:
        return together([self.allgather([o], [i], opts) for o, i in zip(output_lists, inputs, strict=True)])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        return self.allgather([self._parts(output, tensor)], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist._Work:
        return together([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def gather(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        root = _root(opts)
        outputs = _nested(output_lists) if self._rank == root else ()

        def prepare() -> Collective:
            if self._rank == root:
                self._one_for_each_rank("outputs", outputs)

            return collectives.gather(root)

        return self._post(f"gather to rank {root}", (inputs[0], *outputs), outputs, opts, prepare)

    def scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> GroupWork:
        root = _root(opts)
        inputs = _nested(input_lists) if self._rank == root else ()

        def prepare() -> Collective:
            if self._rank == root:
                self._one_for_each_rank("inputs", inputs)

            return collectives.scatter(root)

        return self._post(f"scatter from rank {root}", (outputs[0], *inputs), outputs[:1], opts, prepare)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> GroupWork:
        def prepare() -> Collective:
            self._one_for_each_rank("outputs", outputs)
            self._one_for_each_rank("inputs", inputs)
            return collectives.all_to_all

        return self._post("all_to_all", (*outputs, *inputs), outputs, opts, prepare)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        outputs = self._split("output", output, output_split_sizes)
        return self.alltoall(outputs, self._split("input", tensor, input_split_sizes), opts)

    def barrier(self, opts: Any = None) -> GroupWork:
        return self._post("barrier", (), (), opts, lambda: nothing)

    # Point to point

    def send(self, tensors: Sequence[Tensor] | Tensor, dst: int, tag: int = 0) -> SendWork:
        (tensor,) = _listed(tensors)
        check_tensor(f"send to rank {dst}", tensor)
        self._check_rank(dst)
        self._store.send(tensor, dst, tag)
        return SendWork()

    def recv(self, tensors: Sequence[Tensor] | Tensor, src: int, tag: int = 0) -> ReceiveWork:
        (buffer,) = _listed(tensors)
        _check_written(f"recv from rank {src}", buffer)
        return self.receive(src, tag, buffer)

    def recv_anysource(self, tensors: Sequence[Tensor] | Tensor, tag: int = 0) -> ReceiveWork:
        (buffer,) = _listed(tensors)
        return self.receive(None, tag, buffer)

    def receive(self, src: int | None, tag: int, buffer: Tensor | None = None) -> ReceiveWork:
        """The next message of ``src`` (any rank where None); without a buffer it may have any shape."""
        if src is not None:
            self._check_rank(src)

        call = f"group {self._name!r}, rank {self._rank}, recv"
        return ReceiveWork(self._store.expect(src, tag), buffer, self._timeout, call)

    # Names of torch 2.12 and older

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # What they share

    def _reduction(
        self,
        name: str,
        reduced: Sequence[Tensor],
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        opts: Any,
        prepare: Callable[[str, float | None], Collective],
    ) -> GroupWork:
        op, factor = _op_of(opts)
        scale = "" if factor is None else f" by {factor}"
        call = f"{name}({_shapes(reduced)}, {op}{scale})"
        return self._post(call, tensors, written, opts, lambda: prepare(op, factor))

    def _post(
        self,
        call: str,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        opts: Any,
        prepare: Callable[[], Collective],
    ) -> GroupWork:
        """Check the call and post it. A call that is wrong by itself is told to the peers before it is raised."""
        try:
            for tensor in tensors:
                check_tensor(call, tensor)

            for tensor in written:
                _check_written(call, tensor)

            work = prepare()
        except Exception as error:
            self._engine.refuse(call, error)
            raise

        ticket = self._engine.post(call, [tensor.detach() for tensor in tensors], work)
        timeout = seconds_of(getattr(opts, "timeout", None), self._timeout)
        return GroupWork(ticket, written, timeout)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(f"group {self._name!r}: there is no rank {rank}; it has rank 0 to rank {self._size - 1}")

    def _one_for_each_rank(self, what: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"needs {self._size} {what}, one for each rank, not {len(tensors)}")

    def _parts(self, whole: Tensor, part: Tensor) -> Sequence[Tensor]:
        """``whole`` as one piece for each rank, each of ``part``'s shape."""
        if whole.numel() != part.numel() * self._size:
            # As it stands: the caller's check finds that it does not fit, and tells the peers.
            return [whole]

        shape = (self._size, *part.shape)
        return list((whole if whole.shape == shape else whole.view(shape)).unbind(0))

    def _split(self, what: str, whole: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        if sizes:
            return list(whole.split(list(sizes))) if sum(sizes) == whole.shape[0] else [whole]

        return list(whole.chunk(self._size)) if whole.shape[0] % self._size == 0 else [whole]


def _rule(op: str, tensors: Sequence[Tensor]) -> Rule:
    return rule(op, tensors[0].dtype)


def _listed(tensors: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _nested(lists: Sequence[Any]) -> Sequence[Tensor]:
    """The only list in a list of lists, or the list itself."""
    return lists if lists and isinstance(lists[0], Tensor) else lists[0]


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))


def _op_of(opts: Any) -> tuple[str, float | None]:
    op: Any = getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return "premul_sum", float(factor)

    return _OPS[kind], None


def _shapes(tensors: Sequence[Tensor]) -> str:
    """``float32[2, 3]``; several tensors of one shape as ``4 x float32[2, 3]``."""
    texts = [f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" for tensor in tensors]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} x {texts[0]}"

    return ", ".join(texts)


def _fits(what: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        raise ValueError(f"this rank's {what} is {_shapes([tensor])}, but {_shapes([other])} among the ranks'")


def _check_written(call: str, tensor: Tensor) -> None:
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UnsupportedTensorError(f"{call}: can't write to an expanded tensor: its elements share memory; clone it")
