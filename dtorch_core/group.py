"""ThreadGroup: collectives with fresh results, over any c10d process group.

The process group is the backend's. What is built on it here, once: results of their own, shards of different sizes,
checks of the arguments, and Works that carry what the blocking call returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core import _c10d, _notes, _p2p
from dtorch_core._context import BackendContext
from dtorch_core._opening import open_backend
from dtorch_core._selector import spec_of
from dtorch_core._shapes import Shape, check_alike, chunk_sizes, describe, joined, own_dim, read, result_memory, write
from dtorch_core._text import rank_list
from dtorch_core._work import Started, Work
from dtorch_core.checks import check_tensor
from dtorch_core.errors import PluginError, StoreTimeoutError, UnsupportedOperationError
from dtorch_core.reduction import rule

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
Launch = Callable[[], dist.Work]
Prepared = tuple[Launch, Callable[[], T]]
"""What starts the c10d collective, and what gives the call's result once it is done."""


class ThreadGroup:
    """One rank's handle on a group of ranks. Inputs are never changed, unless ``out`` is the input itself.

    Every collective takes ``timeout`` (seconds; None is the group's) and ``async_op=True``, which returns a
    :class:`Work` that carries what the blocking call returns; those with a tensor result take ``out``, memory for it.
    Each raises, on every rank:

    :class:`CollectiveMismatchError` if the ranks' calls do not fit each other; the group stays usable;
    :class:`StoreTimeoutError` if ranks have not come in time; later calls raise :class:`AbortedError`;
    :class:`PeerLostError` if a rank died or left.
    """

    def __init__(self, process_group: dist.ProcessGroup, ctx: BackendContext) -> None:
        self.process_group = process_group
        """The c10d process group under it, for DeviceMesh, DTensor, DDP and the like."""
        self.name = ctx.name
        self.rank = ctx.rank
        self.world_size = ctx.world_size
        self.device = ctx.device
        self.topology = ctx.topology
        self.selection = ctx.selection
        self.backend = ctx.selection.chosen or ""
        self.timeout = ctx.timeout
        self._capabilities = spec_of(ctx.selection).capabilities
        self._rendezvous = ctx.rendezvous
        self._splits = itertools.count()
        self._closed = False

    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401 - a Tensor, or a Work of one
        """The reduction of all ranks' ``x``, which have one shape. The rules are in :mod:`dtorch_core.reduction`.

        :raises UnsupportedTensorError: if the op has no meaning on this dtype.
        """
        call, seconds = f"all_reduce({describe(x)}, {op})", self._seconds(timeout)

        def prepare(_: Sequence[str]) -> Prepared[Tensor]:
            self._check(call, x, op)
            result = _copied(call, out, x)
            return lambda: _c10d.all_reduce(self.process_group, result, op, seconds), lambda: result

        return self._run(call, prepare, seconds, async_op)

    def reduce(
        self,
        x: Tensor,
        dst: int = 0,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """The reduction of all ranks' ``x`` on rank ``dst``; None on the others."""
        call, seconds = f"reduce({describe(x)}, {op}, dst={dst})", self._seconds(timeout)

        def prepare(_: Sequence[str]) -> Prepared[Tensor | None]:
            self._check(call, x, op, dst)
            result = _copied(call, out if self.rank == dst else None, x)
            return (
                lambda: _c10d.reduce(self.process_group, result, op, dst, seconds),
                lambda: result if self.rank == dst else None,
            )

        return self._run(call, prepare, seconds, async_op)

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
        call, seconds = f"broadcast({describe(x)}, src={src})", self._seconds(timeout)

        def prepare(_: Sequence[str]) -> Prepared[Tensor]:
            self._check(call, x, root=src)
            result = _copied(call, out, x) if self.rank == src else result_memory(call, out, x, x.shape)
            return lambda: _c10d.broadcast(self.process_group, result, src, seconds), lambda: result

        return self._run(call, prepare, seconds, async_op)

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
        call, seconds = f"all_gather({describe(x)}, dim={dim})", self._seconds(timeout)
        shard = _at_least_1d(x)

        def prepare(texts: Sequence[str]) -> Prepared[Tensor]:
            shapes, along = [found[0] for found in read(texts)], own_dim(dim, shard)
            whole = joined(self._label(call), shapes, along)
            self._check_uneven(call, shapes)
            result = result_memory(call, out, shard, whole)
            parts = result.split([shape.sizes[along] for shape in shapes], along)
            return lambda: _c10d.all_gather(self.process_group, parts, shard.detach(), seconds), lambda: result

        def tell() -> str:
            self._check(call, shard)
            own_dim(dim, shard)
            return write([shard])

        return self._exchange(f"all_gather(dim={dim})", call, tell, prepare, seconds, async_op)

    def all_gather_list(self, x: Tensor, *, timeout: float | None = None, async_op: bool = False) -> Any:  # noqa: ANN401
        """A list of all ranks' ``x``, in rank order; shapes may differ, dtypes may not."""
        call, seconds = f"all_gather_list({describe(x)})", self._seconds(timeout)

        def prepare(texts: Sequence[str]) -> Prepared[list[Tensor]]:
            shapes = [found[0] for found in read(texts)]
            check_alike(self._label(call), shapes, lambda shape: shape.dtype, "they must have one dtype")
            self._check_uneven(call, shapes)
            results = [shape.empty(x.device) for shape in shapes]
            return lambda: _c10d.all_gather(self.process_group, results, x.detach(), seconds), lambda: results

        def tell() -> str:
            self._check(call, x)
            return write([x])

        return self._exchange("all_gather_list", call, tell, prepare, seconds, async_op)

    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        """This rank's chunk along ``dim`` of the reduction of all ranks' ``x``.

        Chunks have ``torch.chunk``'s sizes where ``dim`` does not divide; the last ranks' may be empty.
        """
        call, seconds = f"reduce_scatter({describe(x)}, dim={dim}, {op})", self._seconds(timeout)

        def prepare(_: Sequence[str]) -> Prepared[Tensor]:
            self._check(call, x, op)
            along = own_dim(dim, x)
            parts = _split(x, along, self.world_size)
            self._check_uneven(call, [Shape.of(part) for part in parts])
            result = result_memory(call, out, x, parts[self.rank].shape)
            return (
                lambda: _c10d.reduce_scatter(self.process_group, result, parts, op, seconds),
                lambda: result,
            )

        return self._run(call, prepare, seconds, async_op)

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
        call = f"all_to_all({describe(x)}, split_dim={split_dim}, concat_dim={concat_dim})"
        seconds = self._seconds(timeout)

        def cut() -> Sequence[Tensor]:
            along = own_dim(split_dim, x)
            return _split(x, along, self.world_size)

        def tell() -> str:
            self._check(call, x)
            own_dim(concat_dim, x)
            return write(cut())

        def prepare(texts: Sequence[str]) -> Prepared[Tensor]:
            inputs, along = cut(), own_dim(concat_dim, x)
            shapes = [found[self.rank] for found in read(texts)]
            whole = joined(self._label(call), shapes, along)
            self._check_uneven(call, [*shapes, *(Shape.of(part) for part in inputs)])
            result = result_memory(call, out, x, whole)
            parts = result.split([shape.sizes[along] for shape in shapes], along)
            return lambda: _c10d.all_to_all(self.process_group, parts, inputs, seconds), lambda: result

        same = f"all_to_all(split_dim={split_dim}, concat_dim={concat_dim})"
        return self._exchange(same, call, tell, prepare, seconds, async_op)

    def all_to_all_list(
        self, xs: Sequence[Tensor], *, timeout: float | None = None, async_op: bool = False
    ) -> Any:  # noqa: ANN401
        """``xs[r]`` goes to rank r; a list of what arrives, in rank order. Shapes may differ, dtypes may not."""
        call, seconds = f"all_to_all_list({', '.join(map(describe, xs))})", self._seconds(timeout)

        def tell() -> str:
            self._check_one_each(call, xs)
            return write(xs)

        def prepare(texts: Sequence[str]) -> Prepared[list[Tensor]]:
            shapes = [found[self.rank] for found in read(texts)]
            check_alike(self._label(call), shapes, lambda shape: shape.dtype, "they must have one dtype")
            self._check_uneven(call, [*shapes, *(Shape.of(x) for x in xs)])
            results = [shape.empty(xs[0].device) for shape in shapes]
            inputs = [x.detach() for x in xs]
            return lambda: _c10d.all_to_all(self.process_group, results, inputs, seconds), lambda: results

        return self._exchange("all_to_all_list", call, tell, prepare, seconds, async_op)

    def gather(
        self, x: Tensor, dst: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:  # noqa: ANN401
        """On rank ``dst`` a list of all ranks' ``x``, whose shapes may differ; None on the others."""
        call, seconds = f"gather({describe(x)}, dst={dst})", self._seconds(timeout)

        def tell() -> str:
            self._check(call, x, root=dst)
            return write([x])

        def prepare(texts: Sequence[str]) -> Prepared[list[Tensor] | None]:
            shapes = [found[0] for found in read(texts)]
            check_alike(self._label(call), shapes, lambda shape: shape.dtype, "they must have one dtype")
            self._check_uneven(call, shapes)
            results = [shape.empty(x.device) for shape in shapes] if self.rank == dst else None
            return (
                lambda: _c10d.gather(self.process_group, results, x.detach(), dst, seconds),
                lambda: results,
            )

        return self._exchange(f"gather(dst={dst})", call, tell, prepare, seconds, async_op)

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
        call = f"scatter({', '.join(map(describe, xs)) if xs else 'None'}, src={src})"
        seconds = self._seconds(timeout)

        def tell() -> str:
            self._check_root(call, src)
            if self.rank != src:
                return "[]"

            self._check_one_each(call, xs)
            return write(xs or ())

        def prepare(texts: Sequence[str]) -> Prepared[Tensor]:
            shapes = read(texts)[src]
            self._check_uneven(call, shapes)
            mine = shapes[self.rank]
            device = out.device if out is not None else torch.device(xs[0].device if xs else self.device)
            result = result_memory(call, out, torch.empty(0, dtype=mine.dtype, device=device), mine.sizes)
            inputs = [x.detach() for x in xs or ()] if self.rank == src else None
            return (
                lambda: _c10d.scatter(self.process_group, result, inputs, src, seconds),
                lambda: result,
            )

        return self._exchange(f"scatter(src={src})", call, tell, prepare, seconds, async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:  # noqa: ANN401
        """Wait until every rank is here. On CUDA this is about the ranks, not about the work they have queued."""
        seconds = self._seconds(timeout)
        return self._run(
            "barrier",
            lambda _: (lambda: _c10d.barrier(self.process_group, seconds), lambda: None),
            seconds,
            async_op,
        )

    def send(
        self, x: Tensor, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:  # noqa: ANN401
        """Send ``x`` to rank ``dst``, which may be this one. Returns when ``x`` may be rewritten.

        It does not wait for the receiver. Messages of one source, destination and tag arrive in order.
        """
        call, seconds = f"send({describe(x)}, dst={dst}, tag={tag})", self._seconds(timeout)
        self._check(call, x, root=dst)
        self._check_p2p(call, dst, tag)
        work = Work(None, lambda _: (_p2p.send(self.process_group, x.detach(), dst, tag), lambda: None), seconds)
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
        :raises CollectiveMismatchError: if ``out`` has another shape or dtype.
        """
        call, seconds = f"recv(src={src}, tag={tag})", self._seconds(timeout)
        if src is not None:
            self._check_root(call, src)

        self._check_p2p(call, src, tag)
        received = _p2p.receive(self.process_group, self.device, src, tag, out)
        work = Work(None, lambda _: (received, lambda: received.result()[0]), seconds)
        if async_op:
            return work

        try:
            return work.result()
        except StoreTimeoutError:
            received.cancel()
            raise

    def split(self, ranks: Sequence[int], *, timeout: float | None = None) -> ThreadGroup | None:
        """A new group of some ranks; rank i of it is ``ranks[i]``. None on the others. All ranks of this group call it.

        :raises ValueError: if ``ranks`` names a rank twice, or one that is not here.
        """
        members, call = list(ranks), f"split({list(ranks)})"
        self._need("split", call)
        number = next(self._splits)

        def tell() -> str:
            if not members or len(set(members)) != len(members) or not set(members) <= set(range(self.world_size)):
                raise ValueError(f"{self._label(call)}: needs different ranks of 0 to {self.world_size - 1}")

            return ""

        def prepare(_: Sequence[str]) -> Prepared[None]:
            return lambda: _c10d.barrier(self.process_group, seconds), lambda: None

        seconds = self._seconds(timeout)
        self._exchange(call, call, tell, prepare, seconds, async_op=False)
        if self.rank not in members:
            return None

        return open_group(
            f"{self.name}/{number}{members}",
            rank=members.index(self.rank),
            world_size=len(members),
            device=self.device,
            rendezvous=dist.PrefixStore("split/", self._rendezvous),
            backend=self.backend if self.selection.asked_by == "argument" else None,
            timeout=self.timeout,
        )

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """Wake every rank from every call of this group, now and later, with :class:`AbortedError`.

        :param died: this rank failed; its peers see :class:`PeerLostError`.
        """
        if isinstance(self.process_group, _notes.SupportsNotes):
            self.process_group.abort(reason, died=died)
        else:
            self.process_group.abort()

    def close(self) -> None:
        """Leave. Local, and may be repeated."""
        if not self._closed:
            self._closed = True
            self.process_group.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ThreadGroup {self.name!r} ({self.backend}) rank {self.rank} of {self.world_size} on {self.device}>"

    # How a call runs

    def _run(self, call: str, prepare: Callable[[Sequence[str]], Prepared[T]], seconds: float, async_op: bool) -> Any:  # noqa: ANN401
        """A call whose ranks know all sizes."""
        work = Work(None, lambda texts: self._launch(call, prepare, texts), seconds)
        return work if async_op else work.result()

    def _exchange(
        self,
        same: str,
        call: str,
        tell: Callable[[], str],
        prepare: Callable[[Sequence[str]], Prepared[T]],
        seconds: float,
        async_op: bool,
    ) -> Any:  # noqa: ANN401
        """A call whose ranks tell each other their sizes first. ``same`` is what all of them have to call."""
        place = _notes.reserve(self.process_group)
        try:
            text = tell()
        except Exception as error:
            _notes.refuse(self.process_group, call, error)
            raise

        def start(texts: Sequence[str]) -> Started[T]:
            with place:
                return self._launch(call, prepare, texts)

        notes = _notes.post(self.process_group, self.device, same, text, seconds)
        work = Work(notes, start, seconds)
        return work if async_op else work.result()

    def _launch(self, call: str, prepare: Callable[[Sequence[str]], Prepared[T]], texts: Sequence[str]) -> Started[T]:
        # What is wrong with this rank's arguments has to reach its peers: they would wait for it otherwise. What the
        # process group itself raises, it has told them.
        try:
            launch, finish = prepare(texts)
        except Exception as error:
            _notes.refuse(self.process_group, call, error)
            raise

        return launch(), finish

    # Checks

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _label(self, call: str) -> str:
        return f"group {self.name!r}, rank {self.rank}, {call}"

    def _check(self, call: str, x: Tensor, op: str | None = None, root: int | None = None) -> None:
        check_tensor(self._label(call), x)
        if op is not None:
            if op in ("band", "bor", "bxor"):
                self._need("bitwise_ops", call)

            rule("" if op == "premul_sum" else op, x.dtype)

        if root is not None:
            self._check_root(call, root)

    def _check_p2p(self, call: str, peer: int | None, tag: int) -> None:
        self._need("p2p", call)
        if peer is None:
            self._need("any_source", call)

        if peer == self.rank:
            self._need("self_send", call)

        if tag != 0:
            self._need("tags", call)

    def _check_root(self, call: str, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"{self._label(call)}: there is no rank {root} ({rank_list(range(self.world_size))})")

    def _check_one_each(self, call: str, xs: Sequence[Tensor] | None) -> None:
        if xs is None or len(xs) != self.world_size:
            found = "None" if xs is None else str(len(xs))
            raise ValueError(f"{self._label(call)}: needs {self.world_size} tensors, one for each rank, not {found}")

        for x in xs:
            check_tensor(self._label(call), x)

    def _check_uneven(self, call: str, shapes: Sequence[Shape]) -> None:
        if len(set(shapes)) > 1:
            self._need("uneven", call)

    def _need(self, capability: str, call: str) -> None:
        if capability not in self._capabilities:
            raise UnsupportedOperationError(
                f"{self._label(call)}: backend {self.backend!r} does not declare {capability!r}"
            )


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
    if not isinstance(process_group, dist.ProcessGroup):
        raise PluginError(
            f"group backend {ctx.selection.chosen!r}: its factory returned {type(process_group).__name__}, "
            f"not a torch.distributed.ProcessGroup"
        )

    return ThreadGroup(process_group, ctx)


def _copied(call: str, out: Tensor | None, x: Tensor) -> Tensor:
    """Memory that holds ``x``'s values and will hold the result."""
    result = result_memory(call, out, x, x.shape)
    if out is not x:
        result.copy_(x.detach())

    return result


def _split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    return list(x.detach().split(chunk_sizes(x.shape[dim], parts), dim))


def _at_least_1d(x: Tensor) -> Tensor:
    return x.reshape(1) if isinstance(x, Tensor) and x.dim() == 0 else x
