"""``python -m benchmarks``: measures, prints tables, and says which goals hold."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

from benchmarks import collectives, exchange, goals, processes, report
from benchmarks.cells import OPERATIONS
from benchmarks.load import OthersLoad

TABLES = ["collectives", "exchange", "processes"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for, and print it."""
    options = _options(arguments)
    torch.set_num_threads(1)
    rounds = options.rounds or (5 if options.quick else 15)
    plan = collectives.Plan(
        device=options.device,
        ranks=options.ranks or ([2] if options.quick else [2, 4]),
        rounds=rounds,
        gloo=options.device == "cpu" if options.gloo is None else options.gloo,
        operations=options.operations or OPERATIONS,
        sizes=options.bytes,
    )
    about, load = report.setting(options.device), OthersLoad()
    wanted = [options.only] if options.only else TABLES if options.device == "cpu" else TABLES[:1]
    measured = report.Measured()
    if "collectives" in wanted:
        measured.collectives = collectives.measure(plan, _progress)

    if "exchange" in wanted:
        measured.exchange = exchange.measure(rounds, _progress)

    if "processes" in wanted:
        measured.of_processes = processes.collectives(rounds, plan.operations, _progress)
        measured.between_processes = processes.exchange(rounds, _progress)

    share = load.share()
    about["taken by other programs"] = "unknown" if share is None else f"{share:.0%} of the cores' time"
    found = list(goals.of_all(measured))
    if options.json:
        print(json.dumps(report.to_dict(about, measured, found), indent=1))
    else:
        print("\n".join(_text(about, rounds, measured, found)))


def _text(
    about: Mapping[str, str], rounds: int, measured: report.Measured, found: Sequence[report.Goal]
) -> Iterator[str]:
    yield ", ".join(f"{name} {value}" for name, value in about.items())
    yield f"medians of {rounds} rounds, the slowest rank's time; ratios are medians of the rounds' ratios"
    for table in report.tables(measured):
        yield ""
        yield from table

    if found:
        yield ""
        yield from report.goals_table(found)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=TABLES, help="these tables only")
    parser.add_argument("--quick", action="store_true", help="2 ranks, 5 rounds: about a minute")
    parser.add_argument("--json", action="store_true", help="everything as JSON, with each round's seconds")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0 with all ranks on it (thread ranks only)")
    parser.add_argument("--gloo", action=argparse.BooleanOptionalAction, help="Gloo too (default: on the CPU)")
    parser.add_argument("--ranks", type=int, nargs="+", help="world sizes (default: 2 4)")
    parser.add_argument("--rounds", type=int, help="measurements of each subject (default: 15)")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, help="these collectives only")
    parser.add_argument("--bytes", type=int, nargs="+", help="these sizes of a rank's input only")
    return parser.parse_args(arguments)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
