"""The collectives of a ThreadGroup that move values as they are. Where sizes may differ, the ranks tell them first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtorch_core._groups import c10d
from dtorch_core._groups.group_calls import GroupCalls, Prepared
from dtorch_core._memory import Memory, same_place
from dtorch_core._shapes import Shape, chunks, describe, describe_all, joined, one_dtype, own_dim, read, write
from dtorch_core.checks import plain_tensor


class Moves(GroupCalls):
    """A part of :class:`ThreadGroup`."""

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
            memory = Memory.holding(label, out, x) if is_source else Memory(label, out, Shape.of(x), x.device)
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
            return chunks(x, own_dim(self._label(call), split_dim, x), self.world_size)

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


def _read_elsewhere(out: Tensor | None, sizes: Sequence[int], dim: int, rank: int, shard: Tensor) -> Sequence[Tensor]:
    """The shard, unless it lies in ``out`` already, where it belongs."""
    out = None if out is None else plain_tensor(out)
    if isinstance(out, Tensor) and out.dim() == shard.dim() and out.shape[dim] == sum(sizes):
        if same_place(out.split(list(sizes), dim)[rank], shard):
            return ()

    return (shard,)


def _plain_tensors(xs: Any) -> Any:  # noqa: ANN401 - checked later
    return [plain_tensor(x) for x in xs] if isinstance(xs, Sequence) else xs


def _at_least_1d(x: Tensor) -> Tensor:
    return x.reshape(1) if isinstance(x, Tensor) and x.dim() == 0 else x
