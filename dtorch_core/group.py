"""ThreadGroup: collectives with fresh results, over any c10d process group.

The process group is the backend's. What is built on it here, once: results of their own, shards of different sizes,
checks of the arguments, and Works that carry what the blocking call returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core import _scope
from dtorch_core._context import BackendContext
from dtorch_core._copies import copy_into
from dtorch_core._groups import c10d
from dtorch_core._groups import p2p as _p2p
from dtorch_core._groups.foreign_work import Over
from dtorch_core._groups.group_calls import GroupCalls, Op, Prepared, word_of
from dtorch_core._groups.work import Work
from dtorch_core._meeting.opening import open_backend
from dtorch_core._memory import Memory, same_place
from dtorch_core._selection.topology import Topology
from dtorch_core._shapes import (
    Shape,
    chunk_sizes,
    describe,
    describe_all,
    joined,
    one_dtype,
    own_dim,
    read,
    write,
)
from dtorch_core._text import not_copied
from dtorch_core.checks import check_written, plain_tensor
from dtorch_core.errors import PluginError
from dtorch_core.extras import end, extras

if TYPE_CHECKING:
    from torch.distributed import Store


class ThreadGroup(GroupCalls):
    """One rank's handle on a group of ranks. Inputs are never changed, unless ``out`` is the input itself.

    Every collective takes ``timeout`` (seconds; None is the group's) and ``async_op=True``, which returns a
    :class:`Work` that carries what the blocking call returns; those with a tensor result take ``out``, memory for it.
    Each raises, on every rank:

    :class:`CollectiveMismatchError` if the ranks' calls do not fit each other; the group stays usable;
    :class:`StoreTimeoutError` if ranks have not come in time; later calls raise :class:`AbortedError`;
    :class:`PeerLostError` if a rank died or left.
    """

    def __init__(self, process_group: dist.ProcessGroup, ctx: BackendContext) -> None:
        super().__init__(process_group, ctx)
        self._board, self._topology = ctx._board, ctx.topology
        self._scope = _scope.current()
        self._splits = itertools.count()
        self._closed = False

    def all_reduce(
        self,
        x: Tensor,
        op: Op = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401 - a Tensor, or a Work of one
        """The reduction of all ranks' ``x``, which have one shape. The rules are in :mod:`dtorch_core.reduction`.

        :param op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor"; torch's ReduceOps stand for them.
        :raises UnsupportedTensorError: if the op has no meaning on this dtype.
        """
        in_place = self._in_place if out is x and timeout is None and not async_op else None
        if in_place is not None and in_place.all_reduce(x, op):
            return x

        x, word = plain_tensor(x), word_of(op)
        call = f"all_reduce({describe(x)}, {word})"

        def prepare() -> Prepared[Tensor]:
            self._check(call, x)
            self._check_op(call, word, x)
            memory = _started_from(self._label(call), out, x)
            return lambda s: c10d.all_reduce(self.process_group, memory.tensor, word, s), memory.result

        result = self._run(call, prepare, timeout, async_op)
        if in_place is not None:
            in_place.learn(x, word, call)

        return result

    def reduce(
        self,
        x: Tensor,
        dst: int = 0,
        op: Op = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """The reduction of all ranks' ``x`` on rank ``dst``; None on the others, whose ``out`` is left alone."""
        x, word = plain_tensor(x), word_of(op)
        call = f"reduce({describe(x)}, {word}, dst={dst})"

        def prepare() -> Prepared[Tensor | None]:
            self._check_rooted(call, x, dst)
            self._check_op(call, word, x)
            # A copy on the other ranks too: some groups leave partial sums there.
            is_root = self.rank == dst
            memory = _started_from(self._label(call), out if is_root else None, x)
            return (
                lambda s: c10d.reduce(self.process_group, memory.tensor, word, dst, s),
                lambda: memory.result() if is_root else None,
            )

        return self._run(call, prepare, timeout, async_op)

    def broadcast(
        self,
        x: Tensor,
        src: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """Rank ``src``'s ``x``. The others' ``x`` say which shape they expect; their values do not matter."""
        x = plain_tensor(x)
        call = f"broadcast({describe(x)}, src={src})"

        def prepare() -> Prepared[Tensor]:
            self._check_rooted(call, x, src)
            label = self._label(call)
            is_source = self.rank == src
            memory = _started_from(label, out, x) if is_source else Memory(label, out, Shape.of(x), x.device)
            return lambda s: c10d.broadcast(self.process_group, memory.tensor, src, s), memory.result

        return self._run(call, prepare, timeout, async_op)

    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """All ranks' ``x``, put together along ``dim`` in rank order. Sizes along ``dim`` may differ, or be zero.

        A 0-dim tensor counts as one element.
        """
        x = plain_tensor(x)
        call = f"all_gather({describe(x)}, dim={dim})"

        def tell() -> str:
            self._check(call, x)
            own_dim(self._label(call), dim, _at_least_1d(x))
            return write([_at_least_1d(x)])

        def prepare(texts: Sequence[str]) -> Prepared[Tensor]:
            label, shard = self._label(call), _at_least_1d(x.detach())
            shapes, along = [found[0] for found in read(texts)], own_dim(label, dim, shard)
            whole = joined(label, shapes, along)
            self._check_uneven(call, shapes)
            sizes = [shape.sizes[along] for shape in shapes]
            memory = Memory(label, out, whole, x.device, _read_elsewhere(out, sizes, along, self.rank, shard))
            parts = memory.tensor.split(sizes, along)
            return lambda s: c10d.all_gather(self.process_group, parts, shard, s), memory.result

        return self._exchange(f"all_gather(dim={dim})", call, tell, prepare, timeout, async_op)

    def all_gather_list(self, x: Tensor, *, timeout: float | None = None, async_op: bool = False) -> Any:  # noqa: ANN401
        """A list of all ranks' ``x``, in rank order; shapes may differ, dtypes may not."""
        x = plain_tensor(x)
        call = f"all_gather_list({describe(x)})"

        def tell() -> str:
            self._check(call, x)
            return write([x])

        def prepare(texts: Sequence[str]) -> Prepared[list[Tensor]]:
            shapes = [found[0] for found in read(texts)]
            one_dtype(self._label(call), shapes)
            self._check_uneven(call, shapes)
            results = [shape.empty(x.device) for shape in shapes]
            return lambda s: c10d.all_gather(self.process_group, results, x.detach(), s), lambda: results

        return self._exchange("all_gather_list", call, tell, prepare, timeout, async_op)

    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        op: Op = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """This rank's chunk along ``dim`` of the reduction of all ranks' ``x``.

        Chunks have ``torch.chunk``'s sizes where ``dim`` does not divide; the last ranks' may be empty.
        """
        x, word = plain_tensor(x), word_of(op)
        call = f"reduce_scatter({describe(x)}, dim={dim}, {word})"

        def prepare() -> Prepared[Tensor]:
            self._check(call, x)
            self._check_op(call, word, x)
            label = self._label(call)
            parts = _chunks(x, own_dim(label, dim, x), self.world_size)
            self._check_uneven(call, [Shape.of(part) for part in parts])
            mine = parts[self.rank]
            in_place = isinstance(out, Tensor) and same_place(plain_tensor(out), mine)
            others = parts[: self.rank] + parts[self.rank + 1 :]
            memory = Memory(label, out, Shape.of(mine), x.device, others if in_place else parts)
            return lambda s: c10d.reduce_scatter(self.process_group, memory.tensor, parts, word, s), memory.result

        return self._run(call, prepare, timeout, async_op)

    def all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        concat_dim: int,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """Chunk r of ``x`` along ``split_dim`` goes to rank r; what arrives is put together along ``concat_dim``.

        Chunks have ``torch.chunk``'s sizes. Ranks' sizes along ``concat_dim`` may differ.
        """
        x = plain_tensor(x)
        call = f"all_to_all({describe(x)}, split_dim={split_dim}, concat_dim={concat_dim})"

        def cut() -> list[Tensor]:
            return _chunks(x, own_dim(self._label(call), split_dim, x), self.world_size)

        def tell() -> str:
            self._check(call, x)
            own_dim(self._label(call), concat_dim, x)
            return write(cut())

        def prepare(texts: Sequence[str]) -> Prepared[Tensor]:
            label, found = self._label(call), read(texts)
            inputs, along = cut(), own_dim(label, concat_dim, x)
            # Everybody checks what everybody gets, so that all ranks fail if one would.
            arriving = [[sent[rank] for sent in found] for rank in range(self.world_size)]
            wholes = [joined(label, shapes, along) for shapes in arriving]
            self._check_uneven(call, [shape for shapes in arriving for shape in shapes])
            memory = Memory(label, out, wholes[self.rank], x.device, inputs)
            parts = memory.tensor.split([shape.sizes[along] for shape in arriving[self.rank]], along)
            return lambda s: c10d.all_to_all(self.process_group, parts, inputs, s), memory.result

        same = f"all_to_all(split_dim={split_dim}, concat_dim={concat_dim})"
        return self._exchange(same, call, tell, prepare, timeout, async_op)

    def all_to_all_list(
        self, xs: Sequence[Tensor], *, timeout: float | None = None, async_op: bool = False
    ) -> Any:  # noqa: ANN401
        """``xs[r]`` goes to rank r; a list of what arrives, in rank order. Shapes may differ, dtypes may not."""
        xs = _plain_tensors(xs)
        call = f"all_to_all_list({describe_all(xs)})"

        def tell() -> str:
            self._check_one_each(call, xs)
            return write(xs)

        def prepare(texts: Sequence[str]) -> Prepared[list[Tensor]]:
            found = read(texts)
            one_dtype(self._label(call), [sent[0] for sent in found])
            self._check_uneven(call, [shape for sent in found for shape in sent])
            results = [sent[self.rank].empty(xs[0].device) for sent in found]
            inputs = [x.detach() for x in xs]
            return lambda s: c10d.all_to_all(self.process_group, results, inputs, s), lambda: results

        return self._exchange("all_to_all_list", call, tell, prepare, timeout, async_op)

    def gather(
        self, x: Tensor, dst: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:  # noqa: ANN401
        """On rank ``dst`` a list of all ranks' ``x``, whose shapes may differ; None on the others."""
        x = plain_tensor(x)
        call = f"gather({describe(x)}, dst={dst})"

        def tell() -> str:
            self._check_rooted(call, x, dst)
            return write([x])

        def prepare(texts: Sequence[str]) -> Prepared[list[Tensor] | None]:
            shapes = [found[0] for found in read(texts)]
            one_dtype(self._label(call), shapes)
            self._check_uneven(call, shapes)
            results = [shape.empty(x.device) for shape in shapes] if self.rank == dst else None
            even = len(set(shapes)) == 1
            return (
                lambda s: c10d.gather(self.process_group, results, x.detach(), dst, s, even=even),
                lambda: results,
            )

        return self._exchange(f"gather(dst={dst})", call, tell, prepare, timeout, async_op)

    def scatter(
        self,
        xs: Sequence[Tensor] | None,
        src: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """``xs[r]`` of rank ``src`` on rank r. The other ranks pass None, and need not know the shapes."""
        xs = _plain_tensors(xs)
        call = f"scatter({describe_all(xs)}, src={src})"

        def tell() -> str:
            self._check_rank(call, src)
            if self.rank != src:
                return "[]"

            self._check_one_each(call, xs)
            return write(xs or ())

        def prepare(texts: Sequence[str]) -> Prepared[Tensor]:
            shapes = read(texts)[src]
            self._check_uneven(call, shapes)
            inputs = [x.detach() for x in xs or ()] if self.rank == src else None
            device = inputs[0].device if inputs else torch.device(self.device)
            if isinstance(out, Tensor):
                device = plain_tensor(out).device  # a source elsewhere is refused by the process group

            memory = Memory(self._label(call), out, shapes[self.rank], device, inputs or ())
            even = len(set(shapes)) == 1
            return lambda s: c10d.scatter(self.process_group, memory.tensor, inputs, src, s, even=even), memory.result

        return self._exchange(f"scatter(src={src})", call, tell, prepare, timeout, async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:  # noqa: ANN401
        """Wait until every rank is here. On CUDA this is about the ranks, not about the work they have queued."""
        if self._beside is None or not self._beside.talks:
            return self._run("barrier", self._barrier, timeout, async_op)

        return self._exchange("barrier", "barrier", lambda: "", lambda _: self._barrier(), timeout, async_op)

    def send(
        self, x: Tensor, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:  # noqa: ANN401
        """Send ``x`` to rank ``dst``, which may be this one. Returns when ``x`` may be rewritten.

        It does not wait for the receiver. Messages of one source, destination and tag arrive in order.
        """
        x = plain_tensor(x)
        call = f"send({describe(x)}, dst={dst}, tag={tag})"
        record, _ = self._begin(call, collective=False)
        seconds = self._seconds(call, timeout, async_op)
        self._check(call, x)
        self._check_p2p(call, dst, tag)
        sent = _p2p.send(self.process_group, self._beside, x.detach(), dst, tag, seconds)
        work = Work(call, None, lambda _: (sent, lambda: None), seconds, self.device, record)
        return work if async_op else work.result()

    def recv(
        self,
        src: int | None = None,
        tag: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """The next message of rank ``src`` (of any rank where None) with ``tag``; its shape need not be known.

        :raises StoreTimeoutError: if none has come; no message is lost, and the call can be repeated.
        :raises CollectiveMismatchError: if ``out`` has another shape or dtype; the message is dropped.
        """
        call = f"recv(src={src}, tag={tag})"
        record, _ = self._begin(call, collective=False)
        seconds = self._seconds(call, timeout, async_op)
        self._check_p2p(call, src, tag)
        into = None if out is None else plain_tensor(out)
        if into is not None:
            check_written(f"{self._label(call)}, out=", into)

        received = _p2p.receive(self.process_group, self._beside, self.device, src, tag, into, seconds)

        def message() -> Any:  # noqa: ANN401
            return received.result()[0] if out is None else out

        try:
            work = Work(call, None, lambda _: (received, message), seconds, self.device, record)
            return work if async_op else work.result()
        except BaseException:  # Ctrl-C, too: nobody waits for this receipt again
            received.cancel()
            raise

    def split(self, ranks: Sequence[int], *, timeout: float | None = None) -> ThreadGroup | None:
        """A new group of some ranks; rank i of it is ``ranks[i]``. None on the others. All ranks of this group call it.

        :raises ValueError: if ``ranks`` names a rank twice, or one that is not here.
        """
        members = list(ranks) if isinstance(ranks, Iterable) else []
        call, number = f"split({members if isinstance(ranks, Iterable) else ranks!r})", next(self._splits)

        def tell() -> str:
            self._need("split", call)
            for rank in members:
                self._check_rank(call, rank)

            if not members or len(set(members)) != len(members):
                raise ValueError(f"{self._label(call)}: needs ranks, each once")

            return ""

        self._exchange(call, call, tell, lambda _: self._barrier(), timeout, async_op=False)
        if self.rank not in members:
            return None

        with _scope.within(self._scope):  # whichever thread of the rank asked
            group: ThreadGroup = open_backend(
                "group",
                f"{self.name}/{number}{members}",
                _wrapped,
                rank=members.index(self.rank),
                world_size=len(members),
                device=self.device,
                rendezvous=self._board.under("split"),
                backend=self.backend if self.selection.asked_by == "argument" else None,
                timeout=self.timeout,
                known=Topology(replace(self._topology[rank], rank=index) for index, rank in enumerate(members)),
            )
            return group

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """Wake every rank from every call of this group, now and later, with :class:`AbortedError`.

        :param died: this rank failed; its peers see :class:`PeerLostError`.
        """
        own = extras(self.process_group) or self._beside
        if own is not None:
            own.abort(reason, died=died)
        else:
            end(self.process_group, reason or f"rank {self.rank} aborted the group {self.name!r}", died=died)

    def close(self) -> None:
        """Leave. Local, and may be repeated.

        :raises DtorchError: if results were under way on a GPU that will never be right, and no call has said so.
        """
        if not self._closed:
            self._closed = True
            (self.process_group.shutdown if self._beside is None else self._beside.close)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            # No goodbye: whoever raises out of the block leaves its peers in the middle.
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}", died=True)

        self.close()

    def __reduce__(self) -> NoReturn:
        raise not_copied(self, "with open_group")

    def __repr__(self) -> str:
        return f"<ThreadGroup {self.name!r} ({self.backend}) rank {self.rank} of {self.world_size} on {self.device}>"

    def _barrier(self) -> Prepared[None]:
        if self._beside is not None and self._beside.talks:
            return lambda s: Over(), lambda: None  # type: ignore[return-value]  # it has what is used of a Work

        return lambda s: c10d.barrier(self.process_group, s), lambda: None


def open_group(
    name: str,
    *,
    rank: int,
    world_size: int,
    device: str | torch.device | None = None,
    rendezvous: Store | str | None = None,
    backend: str | None = None,
    timeout: float = 300.0,
) -> ThreadGroup:
    """Open a ThreadGroup with the other ranks, on the backend that fits where they are. Collective.

    The parameters and errors are those of :func:`dtorch_core.open_store`.
    """
    group: ThreadGroup = open_backend(
        "group",
        name,
        _wrapped,
        rank=rank,
        world_size=world_size,
        device=device,
        rendezvous=rendezvous,
        backend=backend,
        timeout=timeout,
    )
    return group


def _wrapped(process_group: Any, ctx: BackendContext) -> ThreadGroup:  # noqa: ANN401 - from a plugin
    return ThreadGroup(_checked_process_group(process_group, ctx), ctx)


def _checked_process_group(process_group: Any, ctx: BackendContext) -> dist.ProcessGroup:  # noqa: ANN401
    if not isinstance(process_group, dist.ProcessGroup):
        raise PluginError(
            f"group backend {ctx.selection.chosen!r}: its factory returned {type(process_group).__name__}, "
            f"not a torch.distributed.ProcessGroup"
        )

    return process_group


def _started_from(label: str, out: Tensor | None, x: Tensor) -> Memory:
    """Memory that holds ``x``'s values and will hold the result."""
    in_place = isinstance(out, Tensor) and same_place(plain_tensor(out), x)
    memory = Memory(label, out, Shape.of(x), x.device, () if in_place else (x,))
    if not in_place:
        copy_into(memory.tensor, x.detach())

    return memory


def _read_elsewhere(out: Tensor | None, sizes: Sequence[int], dim: int, rank: int, shard: Tensor) -> Sequence[Tensor]:
    """The shard, unless it lies in ``out`` already, where it belongs."""
    out = None if out is None else plain_tensor(out)
    if isinstance(out, Tensor) and out.dim() == shard.dim() and out.shape[dim] == sum(sizes):
        if same_place(out.split(list(sizes), dim)[rank], shard):
            return ()

    return (shard,)


def _plain_tensors(xs: Any) -> Any:  # noqa: ANN401 - checked later
    return [plain_tensor(x) for x in xs] if isinstance(xs, Sequence) else xs


def _chunks(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    return list(x.detach().split(chunk_sizes(x.shape[dim], parts), dim))


def _at_least_1d(x: Tensor) -> Tensor:
    return x.reshape(1) if isinstance(x, Tensor) and x.dim() == 0 else x
