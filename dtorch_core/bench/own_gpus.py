"""Ranks with a GPU each: a group over NCCL beside torch's bare ProcessGroupNCCL.

``python -m dtorch_core.bench.own_gpus [--ranks N] [--ranks-as threads|processes]`` prints the table. All subjects are
measured by turns; every rank goes through the same list.
"""

from __future__ import annotations

import argparse
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
SIZES = (2**10, 2**20, 2**28)
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


def rows(measured: dict[int, Series]) -> list[tuple[str, str, str, str]]:
    """Size, the two times in microseconds, and what ours costs more: in microseconds, and in per cent."""
    found = []
    for nbytes, series in measured.items():
        ours, raw = series.seconds(OURS), series.seconds(RAW)
        more = median(a - b for a, b in zip(series.rounds[OURS], series.rounds[RAW], strict=True))
        cost = f"{1e6 * more:+.1f} us, {100 * (series.ratio(OURS, RAW) - 1):+.1f} %"
        found.append((size(nbytes), f"{1e6 * ours:.1f}", f"{1e6 * raw:.1f}", cost))

    return found


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


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m dtorch_core.bench.own_gpus", description=__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--ranks-as", choices=("threads", "processes"), default="processes")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    try:
        measured = measure(options.ranks, options.ranks_as, options.rounds, SIZES, print)
    except ValueError as error:
        parser.error(str(error))

    print(f"{'all_reduce':>12} {OURS + ', us':>22} {RAW + ', us':>22}   more")
    for each in rows(measured):
        print("{:>12} {:>22} {:>22}   {}".format(*each))


if __name__ == "__main__":
    main()
