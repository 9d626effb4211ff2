"""Calls a c10d process group's methods under the names, and with the layouts, that it takes.

Many groups read and write a tensor's memory as if it were contiguous, and are wrong in silence where it is not; know
few dtypes; take tensors of one size only; and reduce by rules of their own. A group without
:mod:`dtorch_core.extras` gets stand-ins instead, and results are put to where they belong when the Work is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dtorch_core._copies import plain
from dtorch_core._groups.foreign_reduction import Recipe, recipe
from dtorch_core._groups.foreign_work import ForeignWork
from dtorch_core._groups.stand_ins import AS_THEY_ARE, Layouts, StandIns, as_carried, as_one
from dtorch_core.extras import extras
from dtorch_core.reduction import rule

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
"""ThreadGroup's words for c10d's reduce ops."""


class Terms(NamedTuple):
    """What every call is told besides what it is about."""

    timeout: float
    """Seconds."""
    async_op: bool | None = None
    """The caller goes on meanwhile, or waits at once; None is as c10d has it by itself."""


def options(
    name: str, timeout: float, async_op: bool | None = None, *, op: str | None = None, root: int | None = None
) -> Any:  # noqa: ANN401 - c10d's option classes share no base
    """``AllreduceOptions`` and its like. torch.distributed does not export all of them."""
    opts = getattr(distributed_c10d, name)()
    opts.timeout = timedelta(seconds=timeout)
    if async_op is not None and hasattr(opts, "asyncOp"):
        opts.asyncOp = async_op

    if op is not None:
        opts.reduceOp = OPS[op]

    if root is not None:
        opts.rootRank = root

    return opts


def all_reduce(group: dist.ProcessGroup, tensor: Tensor, op: str, terms: Terms) -> dist.Work:
    if extras(group) is not None:
        return group.allreduce([tensor], options("AllreduceOptions", *terms, op=op))

    def call(x: Tensor, word: str) -> dist.Work:
        return group.allreduce([x], options("AllreduceOptions", *terms, op=word))

    return _reduced(group, tensor, op, terms, call)


def reduce(group: dist.ProcessGroup, tensor: Tensor, op: str, root: int, terms: Terms) -> dist.Work:
    if extras(group) is not None:
        return group.reduce([tensor], options("ReduceOptions", *terms, op=op, root=root))

    def call(x: Tensor, word: str) -> dist.Work:
        return group.reduce([x], options("ReduceOptions", *terms, op=word, root=root))

    return _reduced(group, tensor, op, terms, call)


def broadcast(group: dist.ProcessGroup, tensor: Tensor, root: int, terms: Terms) -> dist.Work:
    opts = options("BroadcastOptions", *terms, root=root)
    return _called(group, terms, lambda lay: group.broadcast([lay.both(tensor)], opts))


def all_gather(group: dist.ProcessGroup, outputs: Sequence[Tensor], tensor: Tensor, terms: Terms) -> dist.Work:
    """``outputs`` may differ in size; every rank knows all of them."""
    if extras(group) is None and _differ(outputs):
        return all_to_all(group, outputs, [tensor] * len(outputs), terms)

    def call(lay: Layouts) -> dist.Work:
        given, taken = lay.inputs([tensor]), lay.outputs(outputs)
        whole = as_one(taken) if isinstance(lay, StandIns) else None
        single = None if whole is None else _single(group, "all_gather_single", "_allgather_base")
        if single is None:
            return group.allgather([taken], given, options("AllgatherOptions", *terms))

        return single(whole, given[0].view(-1), options("AllgatherOptions", *terms))  # without a copy of the whole

    return _called(group, terms, call)


def reduce_scatter(
    group: dist.ProcessGroup, output: Tensor, inputs: Sequence[Tensor], op: str, terms: Terms
) -> dist.Work:
    opts = options("ReduceScatterOptions", *terms, op=op)
    if extras(group) is not None:
        return group.reduce_scatter([output], [list(inputs)], opts)

    how = recipe(op, output.dtype, len(inputs))
    if how.gathered:
        return _gathered(group, output, inputs, op, terms)

    opts.reduceOp = OPS[how.op]
    lay = StandIns()
    values = [_there(how, tensor) for tensor in inputs]
    given = [as_carried(tensor) for tensor in values]
    if how.there is None and not _differ(given):
        taken = lay.outputs([output])[0]
        whole = as_one(given)
        single = None if whole is None else _single(group, "reduce_scatter_single", "_reduce_scatter_base")
        if single is None:
            work = group.reduce_scatter([taken], [given], opts)
        else:
            work = single(taken.view(-1), whole, opts)

        _in_place(lay, how, output, len(inputs))
        return _foreign(work, terms, lay, lazy=group.name() == "gloo")

    # Of one size, since few groups take others: the largest.
    size = max(tensor.numel() for tensor in given)
    mine = given[group.rank()]
    padded = mine.new_zeros(size * len(given)).split(size) if size else [tensor.view(-1) for tensor in given]
    for place, tensor in zip(padded, given, strict=True):
        place[: tensor.numel()].copy_(tensor.view(-1))

    taken = mine.new_empty(size)
    work = group.reduce_scatter([taken], [list(padded)], opts)
    like = values[group.rank()]
    _back(lay, how, output, lambda: taken[: mine.numel()].view(like.dtype).view(like.shape), len(inputs))
    return _foreign(work, terms, lay, lazy=group.name() == "gloo")


def all_to_all(
    group: dist.ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], terms: Terms
) -> dist.Work:
    if extras(group) is None and (group.name() == "gloo" or not _offers(group, "alltoall")):
        return _all_to_all_single(group, outputs, inputs, terms)  # Gloo's lists are of tensors of one size

    opts = options("AllToAllOptions", *terms)
    try:
        return _called(group, terms, lambda lay: group.alltoall(lay.outputs(outputs), lay.inputs(inputs), opts))
    except RuntimeError as error:  # c10d's own, raised before anything is sent
        if "does not support alltoall" not in str(error):
            raise

    return _all_to_all_single(group, outputs, inputs, terms)


def _all_to_all_single(
    group: dist.ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], terms: Terms
) -> dist.Work:
    """For groups that exchange parts of one tensor only, or in lists no parts of different sizes."""
    lay = StandIns()
    given = torch.cat([as_carried(plain(tensor)).view(-1) for tensor in inputs])
    taken = lay.joined(outputs)
    each = 1 if taken.dtype == outputs[0].dtype else outputs[0].element_size()
    arriving, leaving = ([tensor.numel() * each for tensor in tensors] for tensors in (outputs, inputs))
    exchange = _single(group, "all_to_all_single", "alltoall_base") or group.alltoall_base
    return _foreign(exchange(taken, given, arriving, leaving, options("AllToAllOptions", *terms)), terms, lay)


def gather(
    group: dist.ProcessGroup,
    outputs: Sequence[Tensor] | None,
    tensor: Tensor,
    root: int,
    terms: Terms,
    *,
    even: bool = True,
) -> dist.Work:
    """
    :param even: all ranks' tensors have one size.
    """
    if not even and extras(group) is None:
        nothing = tensor.new_empty(0)
        given = [tensor if rank == root else nothing for rank in range(group.size())]
        return all_to_all(group, outputs or [tensor.new_empty(0) for _ in given], given, terms)

    opts = options("GatherOptions", *terms, root=root)
    return _called(
        group,
        terms,
        lambda lay: group.gather([] if outputs is None else [lay.outputs(outputs)], lay.inputs([tensor]), opts),
        one_sided=() if group.rank() != root else None,
    )


def scatter(
    group: dist.ProcessGroup,
    output: Tensor,
    inputs: Sequence[Tensor] | None,
    root: int,
    terms: Terms,
    *,
    even: bool = True,
) -> dist.Work:
    """
    :param even: all ranks' tensors have one size.
    """
    if not even and extras(group) is None:
        nothing = output.new_empty(0)
        taken = [output if rank == root else output.new_empty(0) for rank in range(group.size())]
        return all_to_all(group, taken, inputs or [nothing] * group.size(), terms)

    opts = options("ScatterOptions", *terms, root=root)
    return _called(
        group,
        terms,
        lambda lay: group.scatter(lay.outputs([output]), [] if inputs is None else [lay.inputs(inputs)], opts),
        one_sided=(output,) if group.rank() != root else None,
    )


def barrier(group: dist.ProcessGroup, terms: Terms) -> dist.Work:
    return _called(group, terms, lambda _: group.barrier(options("BarrierOptions", *terms)))


def _called(
    group: dist.ProcessGroup,
    terms: Terms,
    call: Callable[[Layouts], dist.Work],
    *,
    one_sided: Sequence[Tensor] | None = None,
) -> dist.Work:
    if extras(group) is not None:
        return call(AS_THEY_ARE)

    lay = StandIns()
    return _foreign(call(lay), terms, lay, one_sided=one_sided)


def _reduced(
    group: dist.ProcessGroup, tensor: Tensor, op: str, terms: Terms, call: Callable[[Tensor, str], dist.Work]
) -> dist.Work:
    """A reduction of one tensor in place, as the rules say."""
    size = group.size()
    how = recipe(op, tensor.dtype, size)
    if how.gathered:
        return _gathered(group, tensor, [tensor] * size, op, terms)

    lay = StandIns()
    if how.there is not None:
        values = _there(how, tensor)
        work = call(values, how.op)
        _back(lay, how, tensor, lambda: values, size)
        return _foreign(work, terms, lay)

    work = call(lay.both(tensor), how.op)
    _in_place(lay, how, tensor, size)
    return _foreign(work, terms, lay)


def _gathered(
    group: dist.ProcessGroup, output: Tensor, inputs: Sequence[Tensor], op: str, terms: Terms
) -> dist.Work:
    """Every rank gets every value that it needs, and reduces them by itself."""
    lay = StandIns()
    parts = [torch.empty(output.shape, dtype=output.dtype, device=output.device) for _ in inputs]
    work = all_to_all(group, parts, inputs, terms)
    lay.afterwards(output, lambda: rule(op, output.dtype).into(output, parts))
    return _foreign(work, terms, lay)


def _there(how: Recipe, tensor: Tensor) -> Tensor:
    own = tensor if how.view is None else tensor.view(how.view)
    return plain(own) if how.there is None else how.there(own)


def _back(lay: StandIns, how: Recipe, target: Tensor, values: Callable[[], Tensor], size: int) -> None:
    def step() -> None:
        own = target if how.view is None else target.view(how.view)
        own.copy_(values() if how.back is None else how.back(values(), size))

    lay.afterwards(target, step)


def _in_place(lay: StandIns, how: Recipe, target: Tensor, size: int) -> None:
    back = how.back
    if back is not None:
        lay.afterwards(target, lambda: back(target, size))


def _differ(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) > 1


def _single(group: dist.ProcessGroup, name: str, older: str) -> Callable[..., dist.Work] | None:
    """A method under its name, or the one that it had up to torch 2.12; None where a group of Python has neither."""
    return next((getattr(group, each) for each in (name, older) if _offers(group, each)), None)


def _offers(group: dist.ProcessGroup, name: str) -> bool:
    """A class of Python inherits every method of c10d's, and can do those that it has itself."""
    kind = type(group)
    method = getattr(kind, name, None)
    return method is not None and (kind is dist.ProcessGroup or method is not getattr(dist.ProcessGroup, name, None))


def _foreign(
    work: Any,  # noqa: ANN401 - a Work, or one of ours
    terms: Terms,
    lay: StandIns,
    *,
    lazy: bool = False,
    one_sided: Sequence[Tensor] | None = None,
) -> dist.Work:
    # It has what is used of a Work.
    return ForeignWork(  # type: ignore[return-value]
        work, terms.timeout, lay.cuda, lay.steps, lay.written, lazy=lazy, one_sided=one_sided
    )
