"""The collectives of a ThreadGroup that reduce: every rank knows the sizes of the result."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dtorch_core._groups import c10d
from dtorch_core._groups.group_calls import GroupCalls, Op, Prepared, word_of
from dtorch_core._memory import Memory, same_place
from dtorch_core._shapes import Shape, chunks, describe, own_dim
from dtorch_core.checks import plain_tensor


class Reductions(GroupCalls):
    """A part of :class:`ThreadGroup`."""

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
            memory = Memory.holding(self._label(call), out, x)
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
            memory = Memory.holding(self._label(call), out if is_root else None, x)
            return (
                lambda s: c10d.reduce(self.process_group, memory.tensor, word, dst, s),
                lambda: memory.result() if is_root else None,
            )

        return self._run(call, prepare, timeout, async_op)

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
            parts = chunks(x, own_dim(label, dim, x), self.world_size)
            self._check_uneven(call, [Shape.of(part) for part in parts])
            mine = parts[self.rank]
            in_place = isinstance(out, Tensor) and same_place(plain_tensor(out), mine)
            others = parts[: self.rank] + parts[self.rank + 1 :]
            memory = Memory(label, out, Shape.of(mine), x.device, others if in_place else parts)
            return lambda s: c10d.reduce_scatter(self.process_group, memory.tensor, parts, word, s), memory.result

        return self._run(call, prepare, timeout, async_op)
