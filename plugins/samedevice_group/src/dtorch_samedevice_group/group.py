"""The c10d process group of ranks that share a device: checks a call, posts it, returns a Work.

Collectives have the names of torch 2.13 and the older ones; both are called, from Python and from C++. The short
forms of c10d's bindings work too: one tensor for a list of one; a ReduceOp, a root or a timeout for the options.
"""

# c10d's options have no base class, and its bindings overload every method: we take the union of what they take.
# ruff: noqa: ANN401
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core import BackendContext
from dtorch_core._groups.uncompiled import code_of, leave_uncompiled
from dtorch_core._shapes import describe, describe_all
from dtorch_core.checks import check_tensor, check_written
from dtorch_core.extras import Place
from dtorch_core.joint import Ticket
from dtorch_core.reduction import rule
from dtorch_samedevice_group import collectives, repeats
from dtorch_samedevice_group.arguments import (
    Cut,
    both_in_pieces,
    check_fits,
    check_together,
    input_alone,
    input_in_parts,
    listed,
    one_dtype,
    one_each,
    only,
    only_list,
    output_in_parts,
    parts,
    plain,
    plainly,
)
from dtorch_samedevice_group.collectives import Collective
from dtorch_samedevice_group.engine import Engine
from dtorch_samedevice_group.monitored import monitored_barrier
from dtorch_samedevice_group.options import Options, is_async, is_waited_for
from dtorch_samedevice_group.overlaps import Roles, as_one, guarded
from dtorch_samedevice_group.ranges import Range, label_of, profiling, recorded
from dtorch_samedevice_group.repeats import Repeats
from dtorch_samedevice_group.sparse import Parts, SparseWork, checked, is_sparse
from dtorch_samedevice_group.torch_side import TorchSide
from dtorch_samedevice_group.unreal import UnrealWork, are_unreal, is_unreal
from dtorch_samedevice_group.work import GroupWork, ReceiveWork, SendWork, Waited, seconds_of

P = ParamSpec("P")


class Plan(NamedTuple):
    """What one call is to do."""

    call: str
    """The fingerprint: equal on every rank."""
    tensors: Sequence[Tensor]
    """Outputs first, in c10d's order, as :mod:`dtorch_samedevice_group.collectives` expects."""
    written: Sequence[Tensor]
    """Those of them that are outputs: the first ones."""
    work: Collective
    timeout: float | None
    data: str = ""
    """What the ranks tell each other besides; it may differ."""
    cut: Cut | None = None
    """How the tensors follow from those of the call, where they are not the same."""
    roles: Roles | None = None
    """None: no output of a rank can lie across an input that another rank reads."""
    result: Sequence[Tensor] | None = None
    """What the Work gives, where that is not what is written: the output of which those are pieces."""

    @property
    def note(self) -> str:
        """As :mod:`dtorch_samedevice_group.engine` reads it."""
        call = self.call
        if self.tensors and self.tensors[0].is_cuda:
            call += f" on {self.tensors[0].device}"

        return f"{call}\n{call}\n{self.data}" if self.data else call


def _collective(
    plan: Callable[Concatenate[SameDeviceProcessGroup, P], Plan],
) -> Callable[Concatenate[SameDeviceProcessGroup, P], Waited]:
    """A c10d method, of one that says what it is to do."""
    return _method(plan, recorded(plan.__name__, _method(plan, None)))


def _method(
    plan: Callable[Concatenate[SameDeviceProcessGroup, P], Plan], in_range: Callable[..., Waited] | None
) -> Callable[Concatenate[SameDeviceProcessGroup, P], Waited]:
    """
    :param in_range: the same for a profiler; None: this is called by that.
    """
    name = plan.__name__

    @functools.wraps(plan)
    def method(self: SameDeviceProcessGroup, /, *args: P.args, **named: P.kwargs) -> Waited:
        if profiling() and in_range is not None:
            return in_range(self, *args, **named)

        reading = None if named else repeats.read(name, args)
        if reading is not None and (known := self._repeats.get(reading[0])) is not None:
            note, outputs, work, cut, roles, whole, clear = known
            _, tensors, timeout, aside, waited_for = reading
            result = tensors[:1] if whole else None
            at_risk = clear is not None and not clear(tensors)
            if cut is not None:
                tensors = cut(tensors)

            if at_risk and roles is not None:
                tensors = self._guarded(name, tensors, roles)

            seconds = self._timeout if timeout is None else seconds_of(timeout, self._timeout)
            post = self._engine.post_aside if aside and self._coalesced is None else self._engine.post
            posted = GroupWork(post(note, tensors, work), tensors[:outputs] if result is None else result, seconds)
            if self._coalesced is not None:
                self._coalesced.append(posted)
            elif waited_for:
                posted.waited_in = self._store, note

            return posted

        given: Any = args
        if reading is None:
            given, named = plainly(args), plainly(named)
            if are_unreal((*given, *named.values())):
                return self._unreal(plan(self, *given, **named))

        try:
            first: Any = given[0] if given else None
            if name == "allreduce" and is_sparse(first):
                return self._all_reduce_sparse(listed(first), Options.read(given[1:], named))

            planned = plan(self, *given, **named)
            check_together(planned.call, planned.tensors)
            for tensor in planned.written:
                check_written(planned.call, tensor)
        except Exception as error:  # the call is wrong by itself: the peers are told before it is raised
            self._engine.refuse(name, error)
            raise

        if reading is not None:
            self._repeats.learn(reading, planned)

        tensors = [plain(tensor) for tensor in planned.tensors]
        if planned.roles is not None:
            tensors = self._guarded(name, tensors, planned.roles)

        seconds = self._timeout if planned.timeout is None else planned.timeout
        aside = self._coalesced is None and is_async((*args, *named.values()))
        post = self._engine.post_aside if aside else self._engine.post
        outcome = list(planned.written if planned.result is None else planned.result)
        posted = GroupWork(post(planned.note, tensors, planned.work), outcome, seconds)
        if self._coalesced is not None:
            self._coalesced.append(posted)
        elif is_waited_for((*args, *named.values())):
            posted.waited_in = self._store, planned.note

        return posted

    return method


def _with_earlier(
    call: Callable[Concatenate[SameDeviceProcessGroup, P], Waited],
) -> Callable[Concatenate[SameDeviceProcessGroup, P], Waited]:
    """A c10d method that is over when all is that this rank has begun before: who drops a Work counts on that."""

    @functools.wraps(call)
    def method(self: SameDeviceProcessGroup, /, *args: P.args, **named: P.kwargs) -> Waited:
        work = call(self, *args, **named)
        assert isinstance(work, GroupWork)
        work.include_earlier(self._engine.begun())
        return work

    return method


def open_process_group(ctx: BackendContext) -> dist.ProcessGroup:
    """The factory: a process group over a store that the core chooses for the same ranks."""
    return SameDeviceProcessGroup(ctx)


class SameDeviceProcessGroup(TorchSide, dist.ProcessGroup):
    """c10d's collectives as joint work on a TensorStore."""

    def __init__(self, ctx: BackendContext) -> None:
        dist.ProcessGroup.__init__(self, ctx.rank, ctx.world_size)  # type: ignore[call-arg]  # not in torch's stub
        TorchSide.__init__(self, ctx)
        self._store = ctx.open_store("tensors")
        leave_uncompiled("dtorch_core", "dtorch_samedevice_group", *code_of(type(self._store)))
        self._engine = Engine(self._store, ctx.name, aside=ctx.topology.same_process)
        self._repeats = Repeats()
        self._monitored = itertools.count()
        rank, ranks = self._rank, range(self._size)
        # What becomes what on this rank itself may be one memory: see :mod:`dtorch_samedevice_group.overlaps`.
        self._one_input = Roles(ranks, [(self._size, rank)], piece=rank)
        self._one_output = Roles([0], [(1 + r, 0 if r == rank else None) for r in ranks], piece=rank)
        self._one_each = Roles(ranks, [(self._size + r, r if r == rank else None) for r in ranks])

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has begun; equal on ranks that are equally far."""
        return self._engine.number

    # What the core uses besides c10d's methods (dtorch_core.extras)

    def post_notes(self, same: str, call: str, text: str) -> tuple[Ticket, Place]:
        return self._engine.post_note(same, call, text)

    def refuse(self, call: str, error: Exception) -> None:
        self._engine.refuse(call, error)

    def receive(
        self, src: int | None, tag: int, buffer: Tensor | None = None, *, of_its_shape: bool = True
    ) -> ReceiveWork:
        """The next message of ``src`` (any rank where None); without a buffer it may have any shape.

        :param of_its_shape: the message has the buffer's shape, and not only as many elements.
        """
        call = f"group {self._name!r}, rank {self._rank}, recv"
        if src is not None:
            self._check_rank(src)

        if buffer is not None:
            buffer = plainly(buffer)
            check_written(call, buffer)

        work = ReceiveWork(self._store.expect(src, tag), buffer, self._device, self._timeout, call, of_its_shape)
        if self._coalesced is not None:
            self._coalesced.append(work)

        return work

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """Wake every rank from every call of this group, now and later."""
        self._store.abort(reason or f"rank {self._rank} aborted the group {self._name!r}", died=died)

    def shutdown(self) -> None:
        self._store.close()

    # Collectives

    @_collective
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, *opts: Any, **named: Any) -> Plan:
        tensors, options = listed(tensors), Options.read(opts, named)
        work = collectives.all_reduce(rule(options.op, one_dtype(tensors)), options.factor)
        return Plan(f"all_reduce({describe_all(tensors)}, {options.op_text})", tensors, tensors, work, options.timeout)

    allreduce_coalesced = allreduce

    @_collective
    def reduce(self, tensors: Sequence[Tensor] | Tensor, *opts: Any, **named: Any) -> Plan:
        tensor, options = only("tensor", tensors), Options.read(opts, named)
        root = self._check_rank(options.root)
        work = collectives.reduce(rule(options.op, tensor.dtype), root, options.factor)
        call = f"reduce({describe(tensor)}, {options.op_text}, dst={root})"
        return Plan(call, (tensor,), (tensor,) if self._rank == root else (), work, options.timeout)

    @_collective
    def reduce_scatter(self, outputs: Any, input_lists: Any, *opts: Any, **named: Any) -> Plan:
        inputs = only_list("inputs", input_lists)
        return self._reduce_scatter(only("output", outputs), inputs, Options.read(opts, named))

    @_collective
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, *opts: Any, **named: Any) -> Plan:
        cut = input_in_parts(self._size)
        output, *inputs = cut((output, tensor))
        return self._reduce_scatter(output, inputs, Options.read(opts, named))._replace(cut=cut)

    @_collective
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *opts: Any, **named: Any
    ) -> Plan:
        options = Options.read(opts, named)
        return _as_one(
            [
                self._reduce_scatter(output, parts("input", tensor, output, self._size), options)
                for output, tensor in zip(outputs, inputs, strict=True)
            ]
        )

    @_collective
    def broadcast(self, tensors: Sequence[Tensor] | Tensor, *opts: Any, **named: Any) -> Plan:
        tensors, options = listed(tensors), Options.read(opts, named)
        root = self._check_rank(options.root)
        call = f"broadcast({describe_all(tensors)}, src={root})"
        return Plan(call, tensors, tensors, collectives.broadcast(root), options.timeout)

    @_collective
    def allgather(self, output_lists: Any, inputs: Any, *opts: Any, **named: Any) -> Plan:
        outputs = only_list("outputs", output_lists)
        return self._all_gather(outputs, only("input", inputs), Options.read(opts, named))

    @_collective
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *opts: Any, **named: Any
    ) -> Plan:
        options = Options.read(opts, named)
        # One list for each rank, with that rank's tensors in it.
        by_tensor = list(zip(*output_lists, strict=True))
        return _as_one(
            [self._all_gather(outputs, tensor, options) for outputs, tensor in zip(by_tensor, inputs, strict=True)]
        )

    @_collective
    def all_gather_single(self, output: Tensor, tensor: Tensor, *opts: Any, **named: Any) -> Plan:
        cut = output_in_parts(self._size)
        *outputs, tensor = cut((output, tensor))
        return self._all_gather(outputs, tensor, Options.read(opts, named))._replace(cut=cut)

    @_collective
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *opts: Any, **named: Any
    ) -> Plan:
        options = Options.read(opts, named)
        return _as_one(
            [
                self._all_gather(parts("output", output, tensor, self._size), tensor, options)
                for output, tensor in zip(outputs, inputs, strict=True)
            ]
        )

    @_collective
    def gather(self, output_lists: Any, inputs: Any, *opts: Any, **named: Any) -> Plan:
        tensor, options = only("input", inputs), Options.read(opts, named)
        root = self._check_rank(options.root)
        outputs: Sequence[Tensor] = ()
        if self._rank == root:
            outputs = one_each("outputs", only_list("outputs", output_lists), self._size)

        return self._gather(outputs, tensor, options)

    @_collective
    def gather_single(self, output: Tensor, tensor: Tensor, *opts: Any, **named: Any) -> Plan:
        """Of torch 2.14. The output counts on the root alone."""
        options = Options.read(opts, named)
        root = self._check_rank(options.root)
        cut = output_in_parts(self._size) if self._rank == root else input_alone
        *outputs, tensor = cut((output, tensor))
        return self._gather(outputs, tensor, options)._replace(cut=cut)

    @_collective
    def scatter(self, outputs: Any, input_lists: Any, *opts: Any, **named: Any) -> Plan:
        output, options = only("output", outputs), Options.read(opts, named)
        root = self._check_rank(options.root)
        inputs: Sequence[Tensor] = ()
        roles = None
        if self._rank == root:
            inputs, roles = one_each("inputs", only_list("inputs", input_lists), self._size), self._one_output

        work = collectives.scatter(root)
        return Plan(f"scatter(src={root})", (output, *inputs), (output,), work, options.timeout, roles=roles)

    @_collective
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *opts: Any, **named: Any) -> Plan:
        return self._all_to_all(outputs, inputs, Options.read(opts, named))

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        *opts: Any,
        **named: Any,
    ) -> Plan:
        cut = both_in_pieces(output_split_sizes, input_split_sizes, self._size)
        tensors = cut((output, tensor))
        outputs, inputs = tensors[: self._size], tensors[self._size :]
        return self._all_to_all(outputs, inputs, Options.read(opts, named))._replace(cut=cut, result=(output,))

    @_with_earlier
    @_collective
    def barrier(self, *opts: Any, **named: Any) -> Plan:
        return Plan("barrier", (), (), collectives.nothing(), Options.read(opts, named).timeout)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """As :mod:`dtorch_samedevice_group.monitored`; without a timeout, the group's."""
        seconds = self._timeout if timeout is None else seconds_of(timeout, 0)
        monitored_barrier(self._store, next(self._monitored), seconds, self._timeout, wait_all_ranks)

    def _all_reduce_sparse(self, tensors: Sequence[Tensor], options: Options) -> Waited:
        seconds = self._timeout if options.timeout is None else options.timeout
        work = SparseWork(self, checked(tensors, options), options.op, seconds)
        if self._coalesced is not None:
            self._coalesced.append(work)

        return work

    @_collective
    def gather_parts(self, parts: Parts) -> Plan:
        """What a sparse all_reduce does in its second round."""
        return _as_one(
            [
                self._all_gather(parts.indices, parts.own_indices, Options()),
                self._all_gather(parts.values, parts.own_values, Options()),
            ]
        )

    # Point to point

    def send(self, tensors: Sequence[Tensor] | Tensor, dst: int, tag: int = 0) -> SendWork:
        with Range(label_of("send"), (tensors,)) if profiling() else nullcontext():
            return self._send(plainly(only("tensor", tensors)), dst, tag)

    def _send(self, tensor: Tensor, dst: int, tag: int) -> SendWork:
        if is_unreal(tensor):
            self._check_rank(dst)
            return SendWork()

        check_tensor(f"group {self._name!r}, rank {self._rank}, send", tensor)
        self._check_rank(dst)
        with torch.inference_mode(False):  # the copy is the receiver's, who may be in no inference mode
            self._store.send(tensor, dst, tag)

        return SendWork()

    def recv(self, tensors: Sequence[Tensor] | Tensor, src: int, tag: int = 0) -> Waited:
        return self._receive(src, tag, plainly(only("buffer", tensors)))

    def recv_anysource(self, tensors: Sequence[Tensor] | Tensor, tag: int = 0) -> Waited:
        return self._receive(None, tag, plainly(only("buffer", tensors)))

    recvAnysource = recv_anysource  # called from C++ since torch 2.14

    # Names of torch 2.12 and older

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # What they share

    def _unreal(self, plan: Plan) -> Waited:
        """A call of tensors without values: the others are not asked, nor told what is wrong with it."""
        work = UnrealWork(plan.written if plan.result is None else plan.result)
        if self._coalesced is not None:
            self._coalesced.append(work)

        return work

    def _receive(self, src: int | None, tag: int, buffer: Tensor) -> Waited:
        if not is_unreal(buffer):
            work = self.receive(src, tag, buffer, of_its_shape=False)
            if profiling():
                work.range = Range(label_of("recv" if src is not None else "recv_anysource"), (buffer,))

            return work

        if src is not None:
            self._check_rank(src)

        return UnrealWork([buffer])

    def _guarded(self, name: str, tensors: Sequence[Tensor], roles: Roles) -> list[Tensor]:
        try:
            return guarded(tensors, roles)
        except Exception as error:  # no memory for a copy: the peers are told
            self._engine.refuse(name, error)
            raise

    def _reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], options: Options) -> Plan:
        one_each("inputs", inputs, self._size)
        check_fits("output", output, inputs[self._rank])
        work = collectives.reduce_scatter(rule(options.op, one_dtype(inputs)), options.factor)
        call = f"reduce_scatter({describe_all(inputs)}, {options.op_text})"
        return Plan(call, (output, *inputs), (output,), work, options.timeout, roles=self._one_output)

    def _all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, options: Options) -> Plan:
        one_each("outputs", outputs, self._size)
        check_fits("input", tensor, outputs[self._rank])
        call = f"all_gather({describe_all(outputs)})"
        work = collectives.all_gather()
        return Plan(call, (*outputs, tensor), outputs, work, options.timeout, roles=self._one_input)

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor, options: Options) -> Plan:
        call, work = f"gather(dst={options.root})", collectives.gather(options.root)
        roles = self._one_input if self._rank == options.root else None
        return Plan(call, (*outputs, tensor), outputs, work, options.timeout, roles=roles)

    def _all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Options) -> Plan:
        one_each("outputs", outputs, self._size)
        one_each("inputs", inputs, self._size)
        tensors = (*outputs, *inputs)
        alike = len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1
        work, data = collectives.all_to_all(alike), describe_all(tensors)
        return Plan("all_to_all", tensors, outputs, work, options.timeout, data, roles=self._one_each)

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise ValueError(f"group {self._name!r}: there is no rank {rank}; it has rank 0 to rank {self._size - 1}")

        return rank


def _as_one(plans: Sequence[Plan]) -> Plan:
    """Several collectives as one, in one hand-off."""
    return Plan(
        " + ".join(plan.call for plan in plans),
        [tensor for plan in plans for tensor in plan.tensors],
        [tensor for plan in plans for tensor in plan.written],
        collectives.together([plan.work for plan in plans], [len(plan.tensors) for plan in plans]),
        plans[0].timeout if plans else None,
        roles=as_one([plan.roles for plan in plans], [len(plan.tensors) for plan in plans]),
    )
