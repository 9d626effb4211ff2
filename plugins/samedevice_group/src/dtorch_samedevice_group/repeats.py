"""Recognises a call that is like an earlier one, and so needs no planning and no checks.

Programs make the same few calls again and again, and small collectives cost what Python costs: while one rank plans its
call, every other one waits for the GIL. What a plan depends on is quick to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dtorch_samedevice_group.collectives import Collective
from dtorch_samedevice_group.options import PREMUL_SUM, can_be_async, names_of, number_of
from dtorch_samedevice_group.overlaps import Clear, Roles, clear_in_lists, clear_of_each_other

if TYPE_CHECKING:
    from dtorch_samedevice_group.arguments import Cut
    from dtorch_samedevice_group.plan import Plan

Form = tuple[object, ...]
"""What a plan depends on: the method, each tensor's GPU, dtype, shape and strides, and the options but for the timeout
and whether the call is async."""

Reading = tuple[Form, list[Tensor], timedelta | None, bool, bool]
"""A call's form, its tensors in the order in which they were given, its timeout, whether it is async on a GPU, and
whether its caller says that it waits at once."""

_STRIDED = torch.strided
_MOST = 1000
"""Forms that are remembered."""


class Known(NamedTuple):
    """A plan for all calls of one form."""

    note: str
    outputs: int
    """How many of the tensors are outputs: the first ones."""
    work: Collective
    cut: Cut | None
    """From the call's tensors, those of the plan; None if they are the same."""
    roles: Roles | None
    whole: bool
    """The Work's result is the call's first tensor, not its pieces."""
    clear: Clear | None
    """Of the call's tensors, that ``roles`` need no closer look; None without roles."""


class Repeats(dict[Form, Known]):
    """The calls of one group."""

    def learn(self, reading: Reading, plan: Plan) -> None:
        """Keep a plan that has passed all checks, if its tensors are those of the call, or can be cut from them."""
        form, tensors, *_ = reading
        if plan.cut is None and not (
            _same(tensors, plan.tensors) and _same(tensors[: len(plan.written)], plan.written)
        ):
            return

        if len(self) >= _MOST:
            self.clear()

        clear, roles = None, plan.roles
        if roles is not None and plan.cut is not None:
            clear = clear_of_each_other(tensors[0], tensors[1], roles.piece)
        elif roles is not None:
            clear = clear_in_lists(tensors, roles)

        self[form] = Known(plan.note, len(plan.written), plan.work, plan.cut, roles, plan.result is not None, clear)


def read(method: str, args: Sequence[object]) -> Reading | None:
    """Read a call; None if there is anything out of the ordinary about it."""
    form: list[object] = [method]
    tensors: list[Tensor] = []
    timeout, on_gpu, aside, waited_for = None, False, False, False
    for arg in args:
        if type(arg) is Tensor:
            arg = [arg]
        elif type(arg) is list and arg and type(arg[0]) is int:
            form.append(tuple(arg))
            continue

        if type(arg) is list:
            if len(arg) == 1 and type(arg[0]) is list:
                arg = arg[0]
                form.append(None)

            try:
                for tensor in arg:
                    if type(tensor) is not Tensor or tensor.layout is not _STRIDED or tensor.requires_grad:
                        return None

                    strides = tensor.stride()  # where it ends, and how it can be cut, depends on that
                    if 0 in strides:
                        return None

                    if tensor.is_cpu:
                        form += tensor.dtype, tensor.shape, strides
                    elif tensor.is_cuda:
                        on_gpu = True
                        form += tensor.get_device(), tensor.dtype, tensor.shape, strides
                    else:
                        return None
            except RuntimeError:  # nested tensors have no strides
                return None

            form.append(len(arg))
            tensors += arg
        elif counts := _counts(type(arg)):  # type: ignore[arg-type]  # mypy takes no type for hashable
            has_op, has_root, may_be_async = counts
            options: Any = arg
            if has_op:
                number = number_of(options.reduceOp)
                if number == PREMUL_SUM:
                    return None  # its factor counts as well

                form.append(number)

            if has_root:
                form.append(options.rootRank)

            if may_be_async:
                waited_for = not options.asyncOp
                aside = on_gpu and not waited_for

            timeout = options.timeout
            if timeout.days < 0:  # stands for none
                timeout = None
        else:
            return None

    return tuple(form), tensors, timeout, aside, waited_for


@cache
def _counts(kind: type) -> tuple[bool, bool, bool] | None:
    """Whether a reduction, a root, and being async count of a class of options; None if it is not one."""
    names = names_of(kind)
    return ("reduceOp" in names, "rootRank" in names, can_be_async(kind)) if "timeout" in names else None


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
