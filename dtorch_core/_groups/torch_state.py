"""What torch keeps to itself is touched here, in :mod:`dtorch_core._groups.torch_kernels` and ``sharded_tensors``.

Each part looks for the feature, and says what it missed.

Some functions of ``torch.distributed`` ask which backend a group has by name, and refuse every other one. For groups
of this project they call the group instead; for all others they are what they were.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

log = logging.getLogger("dtorch")

missed: list[str] = []
"""What this torch does not have as it is expected here, and what follows from that."""

_adapted: set[str] = set()

_HANDING_OVER = "_set_forward_pass_work_handle"
_NO_HANDING_OVER = f"torch's Reducer has no {_HANDING_OVER}(): DDP's join() does not serve groups of dtorch"

_SINCE_2_14 = hasattr(distributed_c10d, "_NonGroupMember")
"""split_group keeps the order of the ranks, and returns what new_group does where this rank is in no part."""

_SINCE_2_15 = hasattr(distributed_c10d._World, "pg_flight_recorder_hooks")
"""Each new group gets hooks that record its collectives."""


def adapt() -> None:
    """Make ``torch.distributed`` ask the groups of this project; once."""
    for function in _asked():
        _ask_the_group(*function)

    _ask_the_companion("shutdown", lambda beside: beside.close())
    _ask_the_companion("abort", lambda beside: beside.abort())
    _keep_works_of_reducers()


def missing() -> list[str]:
    """What :func:`adapt` would miss. Changes nothing."""
    lacks = [_lack(*function) for function in _asked()]
    if _handing_over() is None:
        lacks.append(_NO_HANDING_OVER)

    return [lack for lack in lacks if lack is not None]


def _asked() -> tuple[tuple[str, str, Callable[..., Any]], ...]:
    """c10d's function, which of its parameters is the group, and what is called for a group of this project."""
    functions: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        ("monitored_barrier", "group", _monitored_barrier),
        ("_set_pg_timeout", "group", _set_timeout),
        ("split_group", "parent_pg", _split_group),
    )
    return (*functions, ("_maybe_attach_flight_recorder", "pg", _leave_unrecorded)) if _SINCE_2_15 else functions


def _lack(name: str, parameter: str, ours: Callable[..., Any]) -> str | None:
    """Why c10d's function ``name`` can't be made to call ``ours``; None if it can."""
    try:
        signature = inspect.signature(getattr(distributed_c10d, name))
    except (AttributeError, TypeError, ValueError):
        return f"torch.distributed has no function {name}: it does not serve groups of dtorch"

    if not {parameter, *_known(ours)} <= set(signature.parameters):
        return f"torch.distributed's {name} takes {signature}: it does not serve groups of dtorch"

    return None


def _known(ours: Callable[..., Any]) -> set[str]:
    """The arguments of the call that ``ours`` takes, besides the group."""
    return set(list(inspect.signature(ours).parameters)[1:])


def _ask_the_group(name: str, parameter: str, ours: Callable[..., Any]) -> None:
    """Call ``ours`` instead of c10d's function ``name`` where the argument ``parameter`` is a group of this project.

    It is given the group, and by name those of the call's arguments that it knows.
    """
    if name in _adapted:
        return

    _adapted.add(name)
    lack = _lack(name, parameter, ours)
    if lack is not None:
        miss(lack)
        return

    original = getattr(distributed_c10d, name)
    signature, known = inspect.signature(original), _known(ours)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        try:
            given = signature.bind(*args, **named).arguments
        except TypeError:
            return original(*args, **named)  # raises as it did

        group = given.get(parameter) or distributed_c10d.GroupMember.WORLD
        if is_ours(group) or (ours is _split_group and is_accompanied(group)):
            return ours(group, **{key: value for key, value in given.items() if key in known})

        return original(*args, **named)

    for module in (distributed_c10d, sys.modules["torch.distributed"]):  # while torch itself is being imported, too
        if getattr(module, name, None) is original:
            setattr(module, name, function)


def _ask_the_companion(name: str, ours: Callable[[Any], None]) -> None:
    """Call ``ours`` instead of c10d's method ``name`` of a group beside which a companion stands."""
    if name in _adapted:
        return

    _adapted.add(name)
    original = getattr(distributed_c10d.ProcessGroup, name, None)  # torch itself may still be being imported
    if original is None:
        miss(f"torch.distributed's process groups have no {name}(): their companions do not hear of it")
        return

    @functools.wraps(original)
    def method(self: Any) -> None:  # noqa: ANN401
        from dtorch_core.extras import companion

        beside = companion(self)
        if beside is None:
            original(self)
        else:
            ours(beside)

    setattr(distributed_c10d.ProcessGroup, name, method)


def _keep_works_of_reducers() -> None:
    """DDP's ``join()`` gives a Work to C++, and to nobody else.

    One whose class is written in Python would be half a Work then: C++ would wait in the base class, for ever.
    """
    if _HANDING_OVER in _adapted:
        return

    _adapted.add(_HANDING_OVER)
    original = _handing_over()
    if original is None:
        miss(_NO_HANDING_OVER)
        return

    given: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def method(self: Any, work: Any, *args: Any, **named: Any) -> None:  # noqa: ANN401
        given[self] = work  # the one before is not asked any more
        original(self, work, *args, **named)

    setattr(torch._C._distributed_c10d.Reducer, _HANDING_OVER, method)


def _handing_over() -> Any:  # noqa: ANN401
    """The method by which C++ gets the Work; None where torch has none of its name."""
    return getattr(getattr(torch._C._distributed_c10d, "Reducer", None), _HANDING_OVER, None)


def miss(text: str) -> None:
    """Remember what this torch does not have."""
    missed.append(text)
    log.debug(text)


def is_ours(group: object) -> bool:
    """A process group of this project's kind: it has the methods that are called here."""
    from dtorch_core.extras import extras

    return isinstance(group, torch.distributed.ProcessGroup) and extras(group) is not None


def is_accompanied(group: object) -> bool:
    """A process group of torch's own, made by a backend of this project."""
    from dtorch_core.extras import companion

    return isinstance(group, torch.distributed.ProcessGroup) and companion(group) is not None


def _monitored_barrier(
    group: Any, timeout: timedelta | float | None = None, wait_all_ranks: bool = False  # noqa: ANN401
) -> None:
    group.monitored_barrier(timeout, wait_all_ranks)


def _set_timeout(group: Any, timeout: timedelta) -> None:  # noqa: ANN401
    group.set_timeout(timeout)


def _leave_unrecorded(group: Any) -> None:  # noqa: ANN401
    """The hooks need a backend written in C++: c10d spares groups that have no device types, and those here have them.

    What the ranks called is in errors, and in the flight recorder of this project.
    """


def _split_group(
    parent: Any,  # noqa: ANN401
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> Any:  # noqa: ANN401
    """c10d's own split wants an accelerator that is bound to the default group. Ranks are those of the parent."""
    from dtorch_core.extras import companion

    world: Any = distributed_c10d._world
    if parent not in world.pg_map:
        raise ValueError(f"split_group: {parent} is not a process group of torch.distributed, or was destroyed")

    members = _members(parent, split_ranks)
    number = (companion(parent) or parent).count_split()
    if members is None:
        return distributed_c10d.GroupMember.NON_GROUP_MEMBER if _SINCE_2_14 else None

    backend: Any = world.pg_map[parent][0]
    store = world.pg_map[distributed_c10d._get_default_group()][1]
    global_ranks = [distributed_c10d.get_global_rank(parent, rank) for rank in members]
    name: Any = f"{world.pg_names[parent]}:split:{number}:{'_'.join(map(str, global_ranks))}"
    group, _ = distributed_c10d._new_process_group_helper(
        len(members),
        members.index(parent.rank()),
        global_ranks,
        backend,
        store,
        name,
        timeout=distributed_c10d._get_default_timeout(backend) if timeout is None else timeout,
        group_desc=group_desc,
    )
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(global_ranks)}
    return group


def _members(parent: Any, split_ranks: Sequence[Sequence[int]] | None) -> list[int] | None:  # noqa: ANN401
    """The ranks of this rank's part, in order; None if it is in none."""
    if not split_ranks:
        raise ValueError("split_group: split_ranks must name at least one group of ranks")

    named = [rank for ranks in split_ranks for rank in ranks]
    if len(set(named)) != len(named) or not all(split_ranks):
        raise ValueError(f"split_group: {list(map(list, split_ranks))}: groups need ranks, and share none")

    wrong = [rank for rank in named if not 0 <= rank < parent.size()]
    if wrong:
        raise ValueError(f"split_group: the parent has rank 0 to rank {parent.size() - 1}, and not {wrong}")

    mine = parent.rank()
    part = next((list(ranks) for ranks in split_ranks if mine in ranks), None)
    return part if part is None or _SINCE_2_14 else sorted(part)
