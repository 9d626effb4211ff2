"""The c10d process group of ranks that share a device: what each of its collectives is to do.

Collectives have the names of torch 2.13 and the older ones; both are called, from Python and from C++. The short
forms of c10d's bindings work too: one tensor for a list of one; a ReduceOp, a root or a timeout for the options.
"""

# c10d's options have no base class, and its bindings overload every method: we take the union of what they take.
# ruff: noqa: ANN401
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dtorch_core import BackendContext
from dtorch_core._shapes import describe, describe_all
from dtorch_core.extras import Place
from dtorch_core.joint import Ticket
from dtorch_core.reduction import rule
from dtorch_samedevice_group import collectives
from dtorch_samedevice_group.arguments import (
    both_in_pieces,
    check_fits,
    input_alone,
    input_in_parts,
    listed,
    one_dtype,
    one_each,
    only,
    only_list,
    output_in_parts,
    parts,
)
from dtorch_samedevice_group.calls import collective, with_earlier
from dtorch_samedevice_group.messages import Messages
from dtorch_samedevice_group.monitored import monitored_barrier
from dtorch_samedevice_group.options import Options
from dtorch_samedevice_group.overlaps import Roles
from dtorch_samedevice_group.plan import Plan, as_one
from dtorch_samedevice_group.sparse import Parts, SparseWork, checked, is_sparse
from dtorch_samedevice_group.work import Waited, seconds_of


def open_process_group(ctx: BackendContext) -> dist.ProcessGroup:
    """The factory: a process group over a store that the core chooses for the same ranks."""
    return SameDeviceProcessGroup(ctx)


class SameDeviceProcessGroup(Messages, dist.ProcessGroup):
    """c10d's collectives as joint work on a TensorStore."""

    def __init__(self, ctx: BackendContext) -> None:
        dist.ProcessGroup.__init__(self, ctx.rank, ctx.world_size)  # type: ignore[call-arg]  # not in torch's stub
        Messages.__init__(self, ctx)
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

    def abort(self, reason: str = "", *, died: bool = False) -> None:
        """Wake every rank from every call of this group, now and later."""
        self._store.abort(reason or f"rank {self._rank} aborted the group {self._name!r}", died=died)

    def shutdown(self) -> None:
        self._store.close()

    # Collectives

    @collective
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, *opts: Any, **named: Any) -> Plan:
        tensors, options = listed(tensors), Options.read(opts, named)
        work = collectives.all_reduce(rule(options.op, one_dtype(tensors)), options.factor)
        return Plan(f"all_reduce({describe_all(tensors)}, {options.op_text})", tensors, tensors, work, options.timeout)

    allreduce_coalesced = allreduce

    @collective
    def reduce(self, tensors: Sequence[Tensor] | Tensor, *opts: Any, **named: Any) -> Plan:
        tensor, options = only("tensor", tensors), Options.read(opts, named)
        root = self._check_rank(options.root)
        work = collectives.reduce(rule(options.op, tensor.dtype), root, options.factor)
        call = f"reduce({describe(tensor)}, {options.op_text}, dst={root})"
        return Plan(call, (tensor,), (tensor,) if self._rank == root else (), work, options.timeout)

    @collective
    def reduce_scatter(self, outputs: Any, input_lists: Any, *opts: Any, **named: Any) -> Plan:
        inputs = only_list("inputs", input_lists)
        return self._reduce_scatter(only("output", outputs), inputs, Options.read(opts, named))

    @collective
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, *opts: Any, **named: Any) -> Plan:
        cut = input_in_parts(self._size)
        output, *inputs = cut((output, tensor))
        return self._reduce_scatter(output, inputs, Options.read(opts, named))._replace(cut=cut)

    @collective
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *opts: Any, **named: Any
    ) -> Plan:
        options = Options.read(opts, named)
        return as_one(
            [
                self._reduce_scatter(output, parts("input", tensor, output, self._size), options)
                for output, tensor in zip(outputs, inputs, strict=True)
            ]
        )

    @collective
    def broadcast(self, tensors: Sequence[Tensor] | Tensor, *opts: Any, **named: Any) -> Plan:
        tensors, options = listed(tensors), Options.read(opts, named)
        root = self._check_rank(options.root)
        call = f"broadcast({describe_all(tensors)}, src={root})"
        return Plan(call, tensors, tensors, collectives.broadcast(root), options.timeout)

    @collective
    def allgather(self, output_lists: Any, inputs: Any, *opts: Any, **named: Any) -> Plan:
        outputs = only_list("outputs", output_lists)
        return self._all_gather(outputs, only("input", inputs), Options.read(opts, named))

    @collective
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *opts: Any, **named: Any
    ) -> Plan:
        options = Options.read(opts, named)
        # One list for each rank, with that rank's tensors in it.
        by_tensor = list(zip(*output_lists, strict=True))
        return as_one(
            [self._all_gather(outputs, tensor, options) for outputs, tensor in zip(by_tensor, inputs, strict=True)]
        )

    @collective
    def all_gather_single(self, output: Tensor, tensor: Tensor, *opts: Any, **named: Any) -> Plan:
        cut = output_in_parts(self._size)
        *outputs, tensor = cut((output, tensor))
        return self._all_gather(outputs, tensor, Options.read(opts, named))._replace(cut=cut)

    @collective
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *opts: Any, **named: Any
    ) -> Plan:
        options = Options.read(opts, named)
        return as_one(
            [
                self._all_gather(parts("output", output, tensor, self._size), tensor, options)
                for output, tensor in zip(outputs, inputs, strict=True)
            ]
        )

    @collective
    def gather(self, output_lists: Any, inputs: Any, *opts: Any, **named: Any) -> Plan:
        tensor, options = only("input", inputs), Options.read(opts, named)
        root = self._check_rank(options.root)
        outputs: Sequence[Tensor] = ()
        if self._rank == root:
            outputs = one_each("outputs", only_list("outputs", output_lists), self._size)

        return self._gather(outputs, tensor, options)

    @collective
    def gather_single(self, output: Tensor, tensor: Tensor, *opts: Any, **named: Any) -> Plan:
        """Of torch 2.14. The output counts on the root alone."""
        options = Options.read(opts, named)
        root = self._check_rank(options.root)
        cut = output_in_parts(self._size) if self._rank == root else input_alone
        *outputs, tensor = cut((output, tensor))
        return self._gather(outputs, tensor, options)._replace(cut=cut)

    @collective
    def scatter(self, outputs: Any, input_lists: Any, *opts: Any, **named: Any) -> Plan:
        output, options = only("output", outputs), Options.read(opts, named)
        root = self._check_rank(options.root)
        inputs: Sequence[Tensor] = ()
        roles = None
        if self._rank == root:
            inputs, roles = one_each("inputs", only_list("inputs", input_lists), self._size), self._one_output

        work = collectives.scatter(root)
        return Plan(f"scatter(src={root})", (output, *inputs), (output,), work, options.timeout, roles=roles)

    @collective
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *opts: Any, **named: Any) -> Plan:
        return self._all_to_all(outputs, inputs, Options.read(opts, named))

    @collective
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

    @with_earlier
    @collective
    def barrier(self, *opts: Any, **named: Any) -> Plan:
        return Plan("barrier", (), (), collectives.nothing(), Options.read(opts, named).timeout)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """As :mod:`dtorch_samedevice_group.monitored`; without a timeout, the group's."""
        seconds = self._timeout if timeout is None else seconds_of(timeout, 0)
        monitored_barrier(self._store, next(self._monitored), seconds, self._timeout, wait_all_ranks)

    def _goes_its_own_way(self, name: str, given: Sequence[Any], named: Mapping[str, Any]) -> Waited | None:
        if name != "allreduce" or not given or not is_sparse(given[0]):
            return None

        options = Options.read(given[1:], named)
        seconds = self._timeout if options.timeout is None else options.timeout
        work = SparseWork(self, checked(listed(given[0]), options), options.op, seconds)
        if self._coalesced is not None:
            self._coalesced.append(work)

        return work

    @collective
    def gather_parts(self, parts: Parts) -> Plan:
        """What a sparse all_reduce does in its second round."""
        return as_one(
            [
                self._all_gather(parts.indices, parts.own_indices, Options()),
                self._all_gather(parts.values, parts.own_values, Options()),
            ]
        )

    # Names of torch 2.12 and older

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # What they share

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
