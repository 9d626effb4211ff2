"""The four steps of a tensor on a GPU between two processes, beside torch.multiprocessing's queue.

All subjects are measured by turns; every rank goes through the same list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any

import torch

import dtorch_core
from dtorch_core import RankContext
from dtorch_core.bench.sizes import size
from dtorch_core.bench.timing import Series

STEPS, IDLE, WHOLE = "four steps, host", "four steps, host, idle streams", "four steps, device work included"
"""With work on the streams before, within and after; without; and with that work done, on the device too."""
QUEUE = "torch.multiprocessing"

WARMING = 1000
"""Calls before the first that is measured: about half a second. Until then each takes half as long again."""

Call = Callable[[int], list[float]]
"""So many calls in a row: the seconds of each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What each rank measures."""

    rounds: int
    sizes: Sequence[int]


def measure(device: str, rounds: int, sizes: Sequence[int], progress: Callable[[str], None]) -> dict[int, Series]:
    """One series for each size; the producer's time."""
    progress(f"exchange, {', '.join(map(size, sizes))}, processes on {device}")
    context = get_context("spawn")
    queues = context.SimpleQueue(), context.SimpleQueue()
    answers = dtorch_core.spawn(
        _rank, 2, args=(Plan(rounds, tuple(sizes)), queues), ranks_as="processes", devices=device, timeout=300
    )
    return {nbytes: Series(times) for nbytes, times in answers[0].items()}


def _rank(ctx: RankContext, plan: Plan, queues: Sequence[Any]) -> dict[int, dict[str, list[float]]]:
    """This rank's seconds for each subject, by round."""
    torch.set_num_threads(1)
    with closing(ctx.open_store("bench")) as store, torch.cuda.stream(torch.cuda.Stream()):
        _exchange(store, 4, queues)[STEPS](WARMING)  # else the first size is that of a GPU that has yet to wake
        return {nbytes: _turns(store, _exchange(store, nbytes, queues), plan.rounds) for nbytes in plan.sizes}


def _turns(store: dtorch_core.TensorStore, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        store.barrier()
        took = call(2)[-1]
        if store.rank == 0:
            store.src_set("count", torch.tensor(max(2, min(100, int(0.02 / took)))), store.world_size - 1)
            store.src_wait_until_get_finished("count")

        counts[name] = max(2, min(100, int(0.02 / took))) if store.rank == 0 else 0
        if store.rank > 0:
            with store.borrow("count") as count:
                counts[name] = int(count)

    for _ in range(rounds):
        for name, call in calls.items():
            store.barrier()
            times[name].append(median(call(counts[name])))

    return times


def _exchange(store: dtorch_core.TensorStore, nbytes: int, queues: Sequence[Any]) -> dict[str, Call]:
    there, back = queues
    mine = torch.ones(nbytes // 4, device=store.device)
    torch.cuda.synchronize()

    def steps(count: int, work: bool, whole: bool) -> list[float]:
        taken = []
        for _ in range(count):
            if work:
                torch.cuda.synchronize()

            begin = perf_counter()
            if store.rank == 0:
                if work:
                    mine.add_(1)

                begin = begin if whole else perf_counter()
                store.src_set("k", mine, 1)
                store.src_wait_until_get_finished("k")
                end = perf_counter()
                if work:
                    mine.add_(1)
            else:
                got = store.dest_get("k")
                if work:
                    got.add_(1)

                store.dest_finish_get("k")
                end = perf_counter()

            if whole:
                torch.cuda.synchronize()
                end = perf_counter()

            taken.append(end - begin)

        return taken

    given = mine.clone()
    torch.cuda.synchronize()

    def queue(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            begin = perf_counter()
            if store.rank == 0:
                there.put(given)
                back.get()
            else:
                got = there.get()
                del got
                back.put(0)

            taken.append(perf_counter() - begin)

        return taken

    return {
        STEPS: lambda count: steps(count, work=True, whole=False),
        IDLE: lambda count: steps(count, work=False, whole=False),
        WHOLE: lambda count: steps(count, work=True, whole=True),
        QUEUE: queue,
    }
