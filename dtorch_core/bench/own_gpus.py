"""Ranks with a GPU each: a group over NCCL beside torch's bare ProcessGroupNCCL.

All subjects are measured by turns; every rank goes through the same list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import dtorch_core
from dtorch_core import RankContext, ThreadGroup
from dtorch_core.bench.sizes import size
from dtorch_core.bench.timing import Series

OURS, RAW = "dtorch over NCCL", "ProcessGroupNCCL"
BURST, MOST = 0.03, 200
"""Seconds and calls that one turn takes at most, about."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Plan:
    """What each rank measures."""

    rounds: int
    sizes: Sequence[int]


def measure(
    world_size: int, ranks_as: str, rounds: int, sizes: Sequence[int], progress: Callable[[str], None]
) -> dict[int, Series]:
    """all_reduce in place of float32, one series for each size in bytes: the seconds of the slowest rank.

    :raises ValueError: if there are not as many GPUs as ranks.
    """
    if torch.cuda.device_count() < world_size:
        raise ValueError(f"{world_size} ranks need {world_size} GPUs, and there are {torch.cuda.device_count()}")

    progress(f"all_reduce, {', '.join(map(size, sizes))}, {world_size} {ranks_as} with a GPU each")
    answers = dtorch_core.spawn(
        _rank,
        world_size,
        args=(Plan(rounds, tuple(sizes)),),
        ranks_as=ranks_as,
        devices=[f"cuda:{rank}" for rank in range(world_size)],
        timeout=300,
    )
    return {nbytes: _slowest([answer[nbytes] for answer in answers]) for nbytes in sizes}


def more(series: Series) -> float:
    """Seconds by which ours takes longer: the median of the rounds' differences."""
    return median(ours - raw for ours, raw in zip(series.rounds[OURS], series.rounds[RAW], strict=True))


def _slowest(answers: Sequence[dict[str, list[float]]]) -> Series:
    return Series({name: [max(each) for each in zip(*(a[name] for a in answers), strict=True)] for name in answers[0]})


def _rank(ctx: RankContext, plan: Plan) -> dict[int, dict[str, list[float]]]:
    """This rank's seconds for each subject, by size and round."""
    torch.set_num_threads(1)
    torch.cuda.set_device(ctx.device)
    group = ctx.open_group("bench", backend="nccl")
    assert group is not None, "all ranks are in it"
    with group:
        raw = _raw(group)
        found = {nbytes: _turns(group, raw, nbytes, plan.rounds) for nbytes in plan.sizes}
        torch.cuda.synchronize()
        group.barrier()
        raw.abort()  # all is over on every rank: its orderly end would wait for the others

    return found


def _raw(group: ThreadGroup) -> Any:  # noqa: ANN401 - a c10d backend
    store = dist.PrefixStore("raw", group.process_group.get_group_store())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=group.timeout)
    return dist.ProcessGroupNCCL(store, group.rank, group.world_size, options)


def _turns(group: ThreadGroup, raw: Any, nbytes: int, rounds: int) -> dict[str, list[float]]:  # noqa: ANN401
    x = torch.zeros(nbytes // 4, device=group.device)
    calls: dict[str, Call] = {
        OURS: lambda: group.all_reduce(x, out=x),
        RAW: lambda: raw.allreduce([x], dist.AllreduceOptions()).wait(),
    }
    counts = {name: _count(group, call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            group.barrier()
            times[name].append(median(_timed(call) for _ in range(counts[name])))

    return times


def _count(group: ThreadGroup, call: Call) -> int:
    for _ in range(5):
        call()

    torch.cuda.synchronize()
    own = max(3, min(MOST, int(BURST / _timed(call))))
    return int(group.all_reduce(torch.tensor([own], device=group.device), "min"))


def _timed(call: Call) -> float:
    begin = perf_counter()
    call()
    torch.cuda.synchronize()
    return perf_counter() - begin
