"""Blocking calls in place that are like an earlier one of their group, which torch made.

A small collective takes a few tens of microseconds there, and to check it, to plan it and to put its result where it
belongs takes as long again. Where an earlier call has shown that nothing has to be put anywhere, what is left is to
count it, to begin it and to wait, without c10d's dispatcher.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core._context import BackendContext
from dtorch_core._groups import c10d
from dtorch_core._groups.foreign_reduction import recipe
from dtorch_core._groups.foreign_work import ForeignWork, Queued
from dtorch_core._groups.stand_ins import CARRIED
from dtorch_core._text import interruption
from dtorch_core.extras import Companion

_MOST = 1000
"""Forms that are remembered."""


class _Known(NamedTuple):
    call: str
    options: Any


class InPlace:
    """One rank's handle's."""

    def __init__(self, process_group: dist.ProcessGroup, ctx: BackendContext, beside: Companion) -> None:
        device = torch.device(ctx.device)
        self._backend: Any = process_group._get_backend(device)
        self._rank, self._timeout, self._beside = ctx.rank, ctx.timeout, beside
        self._limit = timedelta(seconds=ctx.timeout)
        self._world_size = ctx.world_size
        self._cuda = device.type == "cuda"
        self._index = device.index if self._cuda else -1
        self._known: dict[object, _Known] = {}

    def learn(self, x: Tensor, op: str, call: str) -> None:
        """``x`` was reduced in place by ``call``, with success."""
        if not self._fits(x) or x.dtype not in CARRIED or not x.numel():
            return

        how = recipe(op, x.dtype, self._world_size)
        if how.there is None and how.back is None and how.view is None and not how.gathered:
            if len(self._known) >= _MOST:
                self._known.clear()

            options = c10d.options("AllreduceOptions", self._timeout, op=how.op)
            self._known[op, x.dtype, x.shape] = _Known(call, options)

    def all_reduce(self, x: Tensor, op: object) -> bool:
        """Reduce ``x`` as an earlier call did. False, and nothing is done, where there was none, or the long way has
        more to look at."""
        if type(op) is not str or not self._fits(x):
            return False

        known = self._known.get((op, x.dtype, x.shape))
        if known is None:
            return False

        call, options = known
        beside = self._beside
        number = beside.begin_alone(call)
        if number is None:
            return False

        work = None
        try:
            work = self._backend.allreduce([x], options)
            if self._cuda:
                beside.launched(call, number, Queued(work, self._timeout))
                work.wait()
            else:
                foreign = ForeignWork(work, self._timeout, False)
                beside.launched(call, number, foreign)
                foreign.wait(self._limit)
        except Exception as error:
            raise beside.explain(call, error) from error.__cause__
        except BaseException as error:  # Ctrl-C; once begun the call goes its way, as it does on the other ranks
            if work is None:
                beside.abort(interruption(self._rank, call, error))

            raise

        return True

    def _fits(self, x: Tensor) -> bool:
        """It is where the group works, and its values lie there as the group reads them."""
        return (
            type(x) is Tensor
            and x.get_device() == self._index
            and x.layout is torch.strided
            and not x.is_nested
            and x.is_contiguous()
            and not x.is_neg()
            and not x.requires_grad
        )
