"""A process group for threads: the rank that comes last does the work, on all ranks' tensors, and wakes the others."""

# ruff: noqa: ANN401 - c10d's options have no common class

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core import AbortedError, BackendContext, DtorchError, PeerLostError, StoreTimeoutError
from dtorch_core.reduction import rule

Offers = Sequence[Any]
"""What each rank brings to a collective, in rank order."""

NAMES = {"PRODUCT": "product", "BAND": "band", "BOR": "bor", "BXOR": "bxor", "SUM": "sum", "MIN": "min", "MAX": "max"}
WORDS = {getattr(dist.ReduceOp, name).value: word for name, word in NAMES.items()}
"""c10d's reduce ops as the words of dtorch_core.reduction, which has the arithmetic."""


class Meeting:
    """One collective. Every rank's first is the first meeting, its second the second one."""

    def __init__(self) -> None:
        self.offers: dict[int, Any] = {}
        self.complete = self.done = False
        self.error = ""


class Shared:
    def __init__(self) -> None:
        self.changed = threading.Condition()  # reentrant: a handle may be collected, and close, at any moment
        self.meetings: dict[int, Meeting] = {}
        self.closed: set[int] = set()
        self.ended: tuple[type[DtorchError], str] | None = None
        """What every wait raises."""
        self.given_up = ""
        """Why no collective can be begun any more. Those that wait have deadlines of their own."""


_shared: dict[str, Shared] = {}


class Done(dist._Work):
    """The Work of a collective that is over when its method returns, as it may be without "async"."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ExampleGroup(dist.ProcessGroup):
    def __init__(self, ctx: BackendContext) -> None:
        super().__init__(ctx.rank, ctx.world_size)  # type: ignore[call-arg]  # not in torch's stub
        self._label, self._rank, self._ranks, self._token = ctx.label, ctx.rank, range(ctx.world_size), ctx.token
        self._all = _shared.setdefault(ctx.token, Shared())
        self._number = 0

    def getBackendName(self) -> str:
        return "example"

    # c10d's collectives, as the core calls them: contiguous tensors, and the options last

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        def work(offers: Offers) -> None:
            _reduce(opts, offers, offers)

        return self._collective(work, tensors[0], opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        def work(offers: Offers) -> None:
            _reduce(opts, [offers[opts.rootRank]], offers)

        return self._collective(work, tensors[0], opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        def work(offers: Offers) -> None:
            for rank in self._ranks:
                if rank != opts.rootRank:
                    offers[rank].copy_(offers[opts.rootRank])

        return self._collective(work, tensors[0], opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        def work(offers: Offers) -> None:
            for parts, _ in offers:
                for part, (_, given) in zip(parts, offers, strict=True):
                    part.copy_(given)

        return self._collective(work, (outputs[0], inputs[0]), opts)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        def work(offers: Offers) -> None:
            for rank, (output, _) in enumerate(offers):
                _reduce(opts, [output], [parts[rank] for _, parts in offers])

        return self._collective(work, (outputs[0], inputs[0]), opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        def work(offers: Offers) -> None:
            for rank, (arriving, _) in enumerate(offers):
                for part, (_, leaving) in zip(arriving, offers, strict=True):
                    part.copy_(leaving[rank])

        return self._collective(work, (outputs, inputs), opts)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        def work(offers: Offers) -> None:
            for part, (_, given) in zip(offers[opts.rootRank][0][0], offers, strict=True):
                part.copy_(given[0])

        return self._collective(work, (outputs, inputs), opts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        def work(offers: Offers) -> None:
            for (output, _), part in zip(offers, offers[opts.rootRank][1][0], strict=True):
                output[0].copy_(part)

        return self._collective(work, (outputs, inputs), opts)

    def barrier(self, opts: Any) -> dist.Work:
        return self._collective(lambda offers: None, None, opts)

    # The end

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        with self._all.changed:
            # The first reason stays, but for a death: who ends a run because of it aborts other ranks' handles, too.
            if self._all.ended is None or (died and self._all.ended[0] is AbortedError):
                pid = f"rank {self._rank} (pid {os.getpid()})"
                self._all.ended = (PeerLostError, f"{pid} was lost: {reason}") if died else (AbortedError, reason)

            self._all.changed.notify_all()

    def shutdown(self) -> None:
        with self._all.changed:
            self._all.closed.add(self._rank)
            self._all.changed.notify_all()
            if len(self._all.closed) == len(self._ranks):
                _shared.pop(self._token, None)

    __del__ = shutdown

    # How the ranks meet

    def _collective(self, work: Callable[[Offers], None], offer: Any, opts: Any) -> dist.Work:
        """Meet the other ranks; ``work`` is done once, on what all of them offer."""
        timeout = opts.timeout.total_seconds()
        deadline = time.monotonic() + timeout
        shared = self._all
        with shared.changed:
            self._check(())
            if shared.given_up:
                raise AbortedError(f"{self._label}, rank {self._rank}: {shared.given_up}")

            number, self._number = self._number, self._number + 1
            meeting = shared.meetings.setdefault(number, Meeting())
            meeting.offers[self._rank] = offer
            last = meeting.complete = len(meeting.offers) == len(self._ranks)
            try:
                while not meeting.complete:
                    missing = [rank for rank in self._ranks if rank not in meeting.offers]
                    self._check(missing)
                    if time.monotonic() >= deadline:
                        raise self._gave_up(f"{_named(missing)} had not come after {timeout} s")

                    shared.changed.wait(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
            except BaseException:
                meeting.offers.pop(self._rank)  # who comes now must not write into tensors that are the caller's again
                raise

            # The last one writes into the others' tensors: until it is done they may not return, whatever happens.
            shared.changed.wait_for(lambda: last or meeting.done)

        if last:
            try:
                with torch.inference_mode():  # it may write any tensor, and each rank has a mode of its own
                    work([meeting.offers[rank] for rank in self._ranks])
            except Exception as error:  # of torch, where the ranks' tensors do not fit each other
                meeting.error = f"{self._label}: {error}"

            with shared.changed:
                meeting.done = True
                del shared.meetings[number]
                shared.changed.notify_all()

        if meeting.error:
            raise RuntimeError(meeting.error)

        return Done()

    def _gave_up(self, why: str) -> StoreTimeoutError:
        """This rank waits no longer: as it has left a collective, none can be begun any more."""
        self._all.given_up = self._all.given_up or f"rank {self._rank} gave up: {why}; open the group anew"
        return StoreTimeoutError(f"{self._label}: {why}")

    def _check(self, missing: Sequence[int]) -> None:
        """Raise if there is nothing to wait for any more."""
        if self._rank in self._all.closed:
            raise AbortedError(f"{self._label}, rank {self._rank}: it is closed")

        if self._all.ended is not None:
            kind, reason = self._all.ended
            raise kind(f"{self._label}, rank {self._rank}: {reason}")

        gone = [rank for rank in missing if rank in self._all.closed]
        if gone:
            raise PeerLostError(f"{self._label}: {_named(gone)} (pid {os.getpid()}) left the group")


def _reduce(opts: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """In rank order, once, so that every rank gets the same bits."""
    word, result = WORDS[getattr(opts.reduceOp, "op", opts.reduceOp).value], torch.empty_like(outputs[0])
    rule(word, result.dtype).into(result, inputs)
    for output in outputs:
        output.copy_(result)


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
