"""Makes a c10d method of one that says what it is to do: its calls are recognised or checked, and posted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from dtorch_core import BackendContext
from dtorch_core._groups.uncompiled import code_of, leave_uncompiled
from dtorch_core.checks import check_written
from dtorch_samedevice_group import repeats
from dtorch_samedevice_group.arguments import check_together, plain, plainly
from dtorch_samedevice_group.engine import Engine
from dtorch_samedevice_group.options import is_async, is_waited_for
from dtorch_samedevice_group.overlaps import Roles, guarded
from dtorch_samedevice_group.plan import Plan
from dtorch_samedevice_group.ranges import profiling, recorded
from dtorch_samedevice_group.repeats import Repeats
from dtorch_samedevice_group.torch_side import TorchSide
from dtorch_samedevice_group.unreal import UnrealWork, are_unreal
from dtorch_samedevice_group.work import GroupWork, Waited, seconds_of


class Calls(TorchSide):
    """What such methods need of their process group."""

    def __init__(self, ctx: BackendContext) -> None:
        super().__init__(ctx)
        self._store = ctx.open_store("tensors")
        leave_uncompiled("dtorch_core", "dtorch_samedevice_group", *code_of(type(self._store)))
        self._engine = Engine(self._store, ctx.name, aside=ctx.topology.same_process)
        self._repeats = Repeats()

    def _goes_its_own_way(self, name: str, given: Sequence[Any], named: Mapping[str, Any]) -> Waited | None:
        """The Work of a call that no plan is made for; None: make one."""
        return None

    def _unreal(self, plan: Plan) -> Waited:
        """A call of tensors without values: the others are not asked, nor told what is wrong with it."""
        work = UnrealWork(plan.written if plan.result is None else plan.result)
        if self._coalesced is not None:
            self._coalesced.append(work)

        return work

    def _guarded(self, name: str, tensors: Sequence[Tensor], roles: Roles) -> list[Tensor]:
        try:
            return guarded(tensors, roles)
        except Exception as error:  # no memory for a copy: the peers are told
            self._engine.refuse(name, error)
            raise

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise ValueError(f"group {self._name!r}: there is no rank {rank}; it has rank 0 to rank {self._size - 1}")

        return rank


P = ParamSpec("P")
G = TypeVar("G", bound=Calls)


def collective(plan: Callable[Concatenate[G, P], Plan]) -> Callable[Concatenate[G, P], Waited]:
    """A c10d method, of one that says what it is to do."""
    return _method(plan, recorded(plan.__name__, _method(plan, None)))


def _method(
    plan: Callable[Concatenate[G, P], Plan], in_range: Callable[..., Waited] | None
) -> Callable[Concatenate[G, P], Waited]:
    """
    :param in_range: the same for a profiler; None: this is called by that.
    """
    name = plan.__name__

    @functools.wraps(plan)
    def method(self: G, /, *args: P.args, **named: P.kwargs) -> Waited:
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
            if (apart := self._goes_its_own_way(name, given, named)) is not None:
                return apart

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


def with_earlier(call: Callable[Concatenate[G, P], Waited]) -> Callable[Concatenate[G, P], Waited]:
    """A c10d method that is over when all is that this rank has begun before: who drops a Work counts on that."""

    @functools.wraps(call)
    def method(self: G, /, *args: P.args, **named: P.kwargs) -> Waited:
        work = call(self, *args, **named)
        assert isinstance(work, GroupWork)
        work.include_earlier(self._engine.begun())
        return work

    return method
