"""Reads what c10d's methods take after the tensors: an options object, or its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch.distributed as dist

from dtorch_core import UnsupportedOperationError
from dtorch_samedevice_group.work import seconds_of

PREMUL_SUM = dist.ReduceOp.PREMUL_SUM.value
"""c10d's number for it; its enums are slow to compare."""


def _is_hash() -> bool:
    """The hash of a ReduceOp is its number, whatever its factor."""
    try:
        ops: list[Any] = [dist.ReduceOp(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.BXOR)]
        ops.append(dist._make_nccl_premul_sum(2.0))
        return all(hash(op) == op.op.value for op in ops)
    except (TypeError, AttributeError):  # it has none, or there is no factor here
        return False


number_of: Callable[[Any], int] = hash if _is_hash() else lambda op: int(op.op.value)
"""c10d's number for a ReduceOp; to ask for its parts costs four times as much as for its hash."""

_OPS = {
    dist.ReduceOp.SUM.value: "sum",
    dist.ReduceOp.AVG.value: "avg",
    dist.ReduceOp.PRODUCT.value: "product",
    dist.ReduceOp.MIN.value: "min",
    dist.ReduceOp.MAX.value: "max",
    dist.ReduceOp.BAND.value: "band",
    dist.ReduceOp.BOR.value: "bor",
    dist.ReduceOp.BXOR.value: "bxor",
    PREMUL_SUM: "premul_sum",
}


class Options(NamedTuple):
    """What a call asks for; what it does not name is c10d's default."""

    op: str = "sum"
    factor: float | None = None
    """Of premul_sum."""
    root: int = 0
    timeout: float | None = None
    """Seconds; None is the group's."""

    @property
    def op_text(self) -> str:
        """As a fingerprint has it."""
        return self.op if self.factor is None else f"{self.op} by {self.factor}"

    @classmethod
    def read(cls, values: Sequence[Any], named: Mapping[str, Any]) -> Options:
        """An options object, a root, a ReduceOp, a timeout: in any order, since no two are of one type."""
        op, factor, root, timeout = "sum", None, 0, None
        for value in _parts((*values, *named.values())):
            if isinstance(value, timedelta):
                timeout = seconds_of(value, 0) or None
            elif isinstance(value, int):
                root = value
            elif value is not None:
                op, factor = _op_of(value)

        return cls(op, factor, root, timeout)


@cache
def names_of(kind: type) -> Sequence[str]:
    """The attributes that count, of a class of options; none if it is not one."""
    return [name for name in ("reduceOp", "rootRank", "timeout") if hasattr(kind, name)]


def is_async(values: Iterable[Any]) -> bool:
    """An options object says that its caller goes on meanwhile. c10d's own say so unless they are told otherwise.

    Without one, as from Python a call may be, it is taken for one that is waited for.
    """
    return any(can_be_async(type(value)) and value.asyncOp for value in values)  # type: ignore[arg-type]


def is_waited_for(values: Iterable[Any]) -> bool:
    """An options object says that its caller waits at once."""
    return any(can_be_async(type(value)) and not value.asyncOp for value in values)  # type: ignore[arg-type]


@cache
def can_be_async(kind: type) -> bool:
    """It is a class of options that say so."""
    return bool(names_of(kind)) and hasattr(kind, "asyncOp")


def _parts(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        names = names_of(type(value))  # type: ignore[arg-type]  # mypy takes no type for hashable
        if names:
            yield from (getattr(value, name) for name in names)
        else:
            yield value


def _op_of(op: Any) -> tuple[str, float | None]:  # noqa: ANN401
    name = _OPS.get(getattr(getattr(op, "op", op), "value", None))
    if name is None:
        raise UnsupportedOperationError(f"there is no reduction for {op}")

    return name, float(op.__getstate__()[1]) if name == "premul_sum" else None
