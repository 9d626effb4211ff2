"""How a ThreadGroup's calls run: checked, told to the peers where they fail, and given back as a Work or its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core._context import BackendContext
from dtorch_core._groups import c10d
from dtorch_core._groups import notes as _notes
from dtorch_core._groups.in_place import InPlace
from dtorch_core._groups.notes import Notes
from dtorch_core._groups.order import Turn
from dtorch_core._groups.work import Record, Started, Work
from dtorch_core._selection.selector import spec_of
from dtorch_core._shapes import Shape, describe
from dtorch_core._text import did_you_mean, interruption, rank_list
from dtorch_core.checks import check_tensor, check_timeout
from dtorch_core.errors import DtorchError, UnsupportedOperationError, UnsupportedTensorError
from dtorch_core.extras import companion, extras
from dtorch_core.recorder import recorder_for
from dtorch_core.reduction import OPS, rule

T = TypeVar("T")
Launch = Callable[[c10d.Terms], dist.Work]
"""Starts the c10d collective."""
Prepared = tuple[Launch, Callable[[], T]]
"""And what gives the call's result once it is done."""
Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""A word of :mod:`dtorch_core.reduction`, or torch's name for it."""

_WORDS = {op.value: word for word, op in c10d.OPS.items()} | {dist.ReduceOp.PREMUL_SUM.value: "premul_sum"}
_KNOWN = [op for op in OPS if op != "premul_sum"]
_INSTEAD = {
    "uneven": "give every rank a shard of one size (pad the small ones)",
    "bitwise_ops": "all_gather the tensors and combine them",
    "async": "call it without async_op",
    "p2p": "hand the tensor over with a store (open_store)",
    "any_source": "name the source",
    "tags": "leave the tag at 0",
    "self_send": "keep the tensor, which needs no message",
    "split": "let the ranks of the part open a group of their own (open_group)",
}
"""The way out for who calls what a backend does not declare."""
_OTHER_NAMES = {"mean": "avg", "average": "avg", "prod": "product", "mul": "product", "add": "sum"}


def not_declared(capability: str) -> str:
    """Ends a message that begins with the backend."""
    instead = _INSTEAD.get(capability, "move the tensor to the rank's device")
    return (
        f"does not declare {capability!r}; {instead}, or use another backend (dtorch explain --kind group shows which "
        f"there are)"
    )


def word_of(op: Op) -> str:
    """torch's ReduceOps as the word for them. Anything else as it is: the check of the call refuses it."""
    if type(op) is str:
        return op

    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        bare: Any = op
        kind = getattr(bare, "op", bare)  # a ReduceOp holds one, a RedOpType is one
        return _WORDS.get(kind.value, str(op))

    return op


class GroupCalls(ABC):
    """The base of :class:`ThreadGroup`: who the group is, and what its calls share."""

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
        self._recorder = recorder_for(ctx.name, ctx.rank, ctx.world_size)
        self._own = extras(process_group) is not None
        """The process group is one of ours."""
        self._beside = companion(process_group)
        self._own_gpu = torch.device(ctx.device) if self._beside is not None and ctx.device != "cpu" else None
        """Where its tensors have to be, if the group would make another communicator for another GPU."""
        self._in_place = (
            None if self._beside is None or self._recorder is not None else InPlace(process_group, ctx, self._beside)
        )

    def _run(
        self, call: str, prepare: Callable[[], Prepared[T]], timeout: float | None, async_op: bool
    ) -> Any:  # noqa: ANN401 - what the call returns, or a Work of it
        """A call whose ranks know all sizes."""
        work: Work[T] | None = None
        try:
            record, number = self._begin(call)
            try:
                seconds = self._seconds(call, timeout, async_op)
            except Exception as error:
                _notes.refuse(self.process_group, call, error, number=number)
                raise

            beside = self._beside
            turn = None if beside is None else beside.turn(call, None)

            def start(_: Sequence[str]) -> Started[T]:
                return self._launch(call, prepare, self._terms(seconds, async_op), number)

            work = Work(call, turn, start, seconds, self.device, record, beside)
            return work if async_op else work.result()
        except BaseException as error:
            self._raised(call, work, error)
            raise

    def _exchange(
        self,
        same: str,
        call: str,
        tell: Callable[[], str],
        prepare: Callable[[Sequence[str]], Prepared[T]],
        timeout: float | None,
        async_op: bool,
    ) -> Any:  # noqa: ANN401
        """A call whose ranks tell each other their sizes first. ``same`` is what all of them have to call."""
        work: Work[T] | None = None
        try:
            record, number = self._begin(call)
            try:
                seconds = self._seconds(call, timeout, async_op)
                text = tell()
            except Exception as error:
                _notes.refuse(self.process_group, call, error, exchange=True, number=number)
                raise

            notes = self._told(same, call, text, seconds)

            def start(texts: Sequence[str]) -> Started[T]:
                with notes.place:
                    return self._launch(call, lambda: prepare(texts), self._terms(seconds, async_op), number)

            work = Work(call, notes, start, seconds, self.device, record, self._beside)
            return work if async_op else work.result()
        except BaseException as error:
            self._raised(call, work, error)
            raise

    def _told(self, same: str, call: str, text: str, seconds: float) -> Notes | Turn:
        """Begin the exchange of every rank's text."""
        beside = self._beside
        try:
            # Where it can't carry texts, the group does, by calls of its own.
            with nullcontext() if beside is None or beside.talks else beside.limited(seconds):
                notes = _notes.post(self.process_group, self.device, same, call, text, seconds)

        except Exception as error:
            if beside is None:
                raise

            raise beside.explain(call, error) from error.__cause__

        if beside is not None and notes.ticket is not None:
            turn: Turn = beside.turn(call, notes.ticket)
            return turn

        return notes

    def _raised(self, call: str, work: Work[Any] | None, error: BaseException) -> None:
        """A call ends with ``error``: one that a signal's handler has raised, as of Ctrl-C, no other rank knows of.

        A blocking call can't be waited for again. So the group is given up, which wakes those who wait in it; and its
        tensors are the caller's when it has raised: what is being done with them is waited for.

        :param work: the call's; None if it was not begun.
        """
        if work is None:
            if isinstance(error, Exception):
                return  # the peers were told why, or the group is over
        elif isinstance(error, DtorchError) or work.is_completed() or (self._beside is not None and work.has_begun):
            return

        with suppress(Exception):  # of a group of torch's own that can't be aborted
            self.abort(interruption(self.rank, call, error))

        if work is not None and self._own:
            with suppress(Exception):
                work.wait()

    @abstractmethod
    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """As :meth:`ThreadGroup.abort`."""

    def conduct(self, call: str, launch: Launch) -> None:
        """Call one of :mod:`dtorch_core._groups.c10d`'s collectives on the process group, and wait for it."""
        if self._beside is None:
            launch(self._terms(self.timeout, False)).wait(timedelta(seconds=self.timeout))
        else:
            self._run(call, lambda: (launch, lambda: None), None, async_op=False)

    def _terms(self, seconds: float, async_op: bool) -> c10d.Terms:
        # Groups of torch's own are told nothing of async: a ForeignWork does not need it, and not all know it.
        return c10d.Terms(seconds, async_op if self._own else None)

    def _launch(self, call: str, prepare: Callable[[], Prepared[T]], terms: c10d.Terms, number: int) -> Started[T]:
        # What is wrong with this rank's arguments has to reach its peers: they would wait for it otherwise. What the
        # process group itself raises, it has told them.
        try:
            launch, finish = prepare()
        except Exception as error:
            _notes.refuse(self.process_group, call, error, number=number)
            raise

        if self._beside is None:
            return launch(terms), finish

        if terms.timeout == self.timeout:
            work = launch(terms)
        else:
            with self._beside.limited(terms.timeout):
                work = launch(terms)

        self._beside.launched(call, number, work)
        return work, finish

    def _begin(self, call: str, *, collective: bool = True) -> tuple[Record | None, int]:
        """This rank makes a call: what the flight recorder has of it, and its number where somebody counts."""
        number = 0 if self._beside is None else self._beside.begin(call, collective=collective)
        return None if self._recorder is None else Record(self._recorder, self._recorder.begin(call)), number

    # Checks. Those that can fail on one rank alone run where their error is told to the peers.

    def _label(self, call: str) -> str:
        return f"group {self.name!r}, rank {self.rank}, {call}"

    def _seconds(self, call: str, timeout: float | None, async_op: bool = False) -> float:
        if async_op:
            self._need("async", call)

        if timeout is None:
            return self.timeout

        try:
            seconds = check_timeout(self._label(call), timeout)
        except TypeError as error:
            raise ValueError(str(error)) from None  # one kind of error for both, which the kit asks for

        return max(0.001, seconds)  # to c10d, zero means "no timeout of its own", and a millisecond is the shortest

    def _check(self, call: str, x: Tensor) -> None:
        check_tensor(self._label(call), x)
        self._need(x.device.type, call)
        if self._own_gpu is not None and x.device != self._own_gpu:
            raise UnsupportedTensorError(
                f"{self._label(call)}: the tensor is on {x.device}, and this rank has {self._own_gpu}; move it first"
            )

    def _check_rooted(self, call: str, x: Tensor, root: int) -> None:
        self._check(call, x)
        self._check_rank(call, root)

    def _check_op(self, call: str, op: str, x: Tensor) -> None:
        if not isinstance(op, str):
            raise TypeError(f"{self._label(call)}: op must be a string ({', '.join(_KNOWN)}), not {op!r}")

        if op not in OPS:
            word = op.lower()
            close = _OTHER_NAMES.get(word, word)
            hint = f" Did you mean {close!r}?" if close in _KNOWN else did_you_mean(word, _KNOWN)
            raise UnsupportedOperationError(
                f"{self._label(call)}: there is no reduce op {op!r}.{hint} Known: {', '.join(_KNOWN)}"
            )

        if op in ("band", "bor", "bxor"):
            self._need("bitwise_ops", call)

        if op == "premul_sum":
            raise UnsupportedOperationError(
                f"{self._label(call)}: premul_sum needs its factor: multiply x first, or use process_group"
            )

        try:
            rule(op, x.dtype)
        except (UnsupportedOperationError, UnsupportedTensorError) as error:
            raise type(error)(f"{self._label(call)}: {error}") from None

    def _check_p2p(self, call: str, peer: int | None, tag: int) -> None:
        self._need("p2p", call)
        if peer is None:
            self._need("any_source", call)
        else:
            self._check_rank(call, peer)

        if peer == self.rank:
            self._need("self_send", call)

        if isinstance(tag, bool) or not isinstance(tag, int):
            raise TypeError(f"{self._label(call)}: tag must be an int, not {tag!r}")

        if tag != 0:
            self._need("tags", call)

    def _check_rank(self, call: str, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"{self._label(call)}: a rank is an int, not {rank!r}")

        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self._label(call)}: there is no rank {rank} ({rank_list(range(self.world_size))})")

    def _check_one_each(self, call: str, xs: Sequence[Tensor] | None) -> None:
        if not isinstance(xs, Sequence) or len(xs) != self.world_size:
            found = str(len(xs)) if isinstance(xs, Sequence) else describe(xs)
            raise ValueError(f"{self._label(call)}: needs {self.world_size} tensors, one for each rank, not {found}")

        for x in xs:
            self._check(call, x)

        if len({(x.dtype, x.device) for x in xs}) > 1:
            raise UnsupportedTensorError(f"{self._label(call)}: the tensors must have one dtype and device")

    def _check_uneven(self, call: str, shapes: Sequence[Shape]) -> None:
        if len(set(shapes)) > 1:
            self._need("uneven", call)

    def _need(self, capability: str, call: str) -> None:
        if capability not in self._capabilities:
            raise UnsupportedOperationError(
                f"{self._label(call)}: backend {self.backend!r} {not_declared(capability)}"
            )
