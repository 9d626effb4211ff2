"""``python -m benchmarks.gpu_processes``: process ranks that share a GPU, beside what one would use instead.

The ranks are processes. All subjects are measured in one run, by turns; every rank goes through the same list.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import dtorch_core
from benchmarks.cells import size
from benchmarks.timing import Series
from dtorch_core import RankContext

KIB, MIB = 2**10, 2**20
EXCHANGED = (KIB, MIB, 16 * MIB, 256 * MIB)
REDUCED = (MIB, 16 * MIB, 256 * MIB)

STEPS, IDLE, WHOLE = "four steps, host", "four steps, host, idle streams", "four steps, device work included"
QUEUE = "torch.multiprocessing"
DTORCH, GLOO = "dtorch", "Gloo"

GOALS = {
    ("exchange", STEPS): {nbytes: 130e-6 for nbytes in EXCHANGED},
    ("exchange", WHOLE): {nbytes: 450e-6 for nbytes in EXCHANGED},
    ("all_reduce", DTORCH): {MIB: 0.5e-3, 256 * MIB: 1.0e-3},
}
"""Seconds at most, for 2 ranks of one H200."""

Key = tuple[str, int]
"""What is done, and how many bytes each rank has."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What each rank measures."""

    rounds: int
    meeting: str
    gloo: bool
    queue: bool
    profile: bool


def measure(ctx: RankContext, plan: Plan, queues: Sequence[Any]) -> tuple[dict[Key, dict[str, list[float]]], str]:
    """This rank's seconds for each subject, by round; and where its time went in the four steps."""
    torch.set_num_threads(1)
    found: dict[Key, dict[str, list[float]]] = {}
    profile = ""
    group = ctx.open_group("bench")
    assert group is not None, "no rank is left out"
    with ctx.open_store("bench") as store, group, torch.cuda.stream(torch.cuda.Stream()):
        if ctx.world_size == 2:
            for nbytes in EXCHANGED:
                found["exchange", nbytes] = _turns(store, _exchange(store, nbytes, plan, queues), plan.rounds)

            if plan.profile:
                profile = _profiled(_exchange(store, KIB, plan, queues)[STEPS])

        if plan.gloo:
            where = dist.FileStore(plan.meeting, ctx.world_size)
            dist.init_process_group("gloo", store=where, rank=ctx.rank, world_size=ctx.world_size)

        for nbytes in REDUCED:
            x = torch.ones(nbytes // 4, device=ctx.device)
            calls = {DTORCH: _reduced(lambda x=x: group.all_reduce(x, out=x))}  # type: ignore[misc]
            if plan.gloo:
                calls[GLOO] = _reduced(lambda x=x: dist.all_reduce(x))  # type: ignore[misc]

            found["all_reduce", nbytes] = _turns(store, calls, plan.rounds)

        if plan.gloo:
            dist.destroy_process_group()

    return found, profile


Call = Callable[[int], list[float]]
"""So many calls in a row: the seconds of each."""


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


def _exchange(store: dtorch_core.TensorStore, nbytes: int, plan: Plan, queues: Sequence[Any]) -> dict[str, Call]:
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

    calls: dict[str, Call] = {
        STEPS: lambda count: steps(count, work=True, whole=False),
        IDLE: lambda count: steps(count, work=False, whole=False),
        WHOLE: lambda count: steps(count, work=True, whole=True),
    }
    return {**calls, QUEUE: queue} if plan.queue else calls


def _reduced(call: Callable[[], object]) -> Call:
    def timed(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            begin = perf_counter()
            call()
            torch.cuda.synchronize()
            taken.append(perf_counter() - begin)

        return taken

    return timed


def _profiled(call: Call) -> str:
    profile = cProfile.Profile()
    profile.enable()
    call(500)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(45)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_processes", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="world sizes (default: 2 4)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each subject (default: 7)")
    parser.add_argument("--gloo", action=argparse.BooleanOptionalAction, default=True, help="Gloo too")
    parser.add_argument("--queue", action=argparse.BooleanOptionalAction, default=True, help="torch's queue too")
    parser.add_argument("--profile", type=Path, help="a file for where the host's time goes in the four steps")
    parser.add_argument("--json", type=Path, help="a file for each round's seconds")
    options = parser.parse_args(arguments)
    everything = []
    print(f"{'':12} {'ranks':>5} {'size':>8}  medians of {options.rounds} rounds, the slowest rank's time", flush=True)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(options.rounds, f"{folder}/meeting", options.gloo, options.queue, options.profile is not None)
            context = get_context("spawn")
            queues = context.SimpleQueue(), context.SimpleQueue()
            answers = dtorch_core.spawn(
                measure, ranks, args=(plan, queues), ranks_as="processes", devices=options.device, timeout=300
            )

        if options.profile is not None and answers[0][1]:
            options.profile.write_text("\n".join(text for _, text in answers))

        for (what, nbytes), subjects in answers[0][0].items():
            # Of an exchange the producer's time counts, of a collective the slowest rank's.
            sides = [answers[0]] if what == "exchange" else answers
            series = Series(
                {
                    name: [max(each) for each in zip(*[side[0][what, nbytes][name] for side in sides], strict=True)]
                    for name in subjects
                }
            )
            everything.append({"what": what, "bytes": nbytes, "ranks": ranks, "rounds": dict(series.rounds)})
            print(_line(what, nbytes, ranks, series), flush=True)

    if options.json is not None:
        options.json.write_text(json.dumps(everything))


def _line(what: str, nbytes: int, ranks: int, series: Series) -> str:
    first = next(iter(series.rounds))
    parts = []
    for name in series.rounds:
        took = series.seconds(name)
        goal = GOALS.get((what, name), {}).get(nbytes) if ranks == 2 else None
        held = "" if goal is None else f" ({'held' if took <= goal else 'MISSED'}: {goal * 1e6:.0f})"
        ratio = f", {series.ratio(name, first):.1f} x" if name != first else ""
        parts.append(f"{name} {took * 1e6:.0f} us{ratio}{held}")

    return f"{what:12} {ranks:>5} {size(nbytes):>8}  " + "; ".join(parts)


if __name__ == "__main__":
    main()
