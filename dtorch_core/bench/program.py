"""One run: measures what is asked for and can be measured here, and prints it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch

from dtorch_core._selection.reasons import Kind
from dtorch_core._selection.selector import choose
from dtorch_core._selection.topology import imagine
from dtorch_core._text import one_line
from dtorch_core.bench import collectives, exchange, facts, goals, gpu_exchange, own_gpus, plot, profile, report
from dtorch_core.bench.collectives import Plan
from dtorch_core.bench.load import OthersLoad
from dtorch_core.bench.timing import Series

TABLES = ("collectives", "exchange", "own-gpus")


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go, beside a table on ``out``."""

    json: str | None = None
    """A file; ``"-"`` for ``out``, in the tables' place."""
    plot: Path | None = None


def run(plan: Plan, tables: Sequence[str], output: Output, out: TextIO) -> list[str]:
    """Measure, and print. What is measured is not lost for want of a place to write it to: the others have it.

    :return: which files could not be written, and why.
    :raises DtorchError: if nothing that is installed can serve these ranks.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        about, load = report.setting(plan.device), OthersLoad()
        measured = _measured(plan, tables)
    finally:
        torch.set_num_threads(threads)

    share = load.share()
    about["taken by other programs"] = "unknown" if share is None else f"{share:.0%} of the cores' time"
    fitted, found = list(report.lines(measured.collectives)), list(goals.of_all(measured))
    drawn = {cell: series for cell, series in measured.collectives.items() if cell.nbytes and not cell.queued}
    if output.plot is not None and not drawn:
        plan.skipped.append(f"{output.plot}: no collective of tensors was measured")

    lost: list[str] = []
    try:
        if output.json != "-":
            print("\n".join(_text(about, plan, measured, found)), file=out, flush=True)
    finally:
        _write(facts.facts(about, measured, fitted, found, plan.skipped), output, out, lost)
        if output.plot is not None and drawn:
            with _noted(output.plot, lost):
                plot.plot(drawn, output.plot)

    return lost


def run_profile(plan: Plan, operation: str, output: Output, out: TextIO) -> list[str]:
    """Say where the time of one small collective goes, for ranks as threads and as processes.

    :return: which files could not be written, and why.
    :raises DtorchError: if nothing that is installed can serve these ranks.
    """
    served = _served(plan, "group")
    found = []
    for how in served.ranks_as:
        _progress(f"{operation}, {how}")
        found.append(profile.profile(operation, plan.sizes[0], plan.device, how, plan.rounds))

    _progress("")
    told = {"setting": report.setting(plan.device), "profiles": [each.to_dict() for each in found]}
    lost: list[str] = []
    try:
        if output.json != "-":
            print("\n\n".join("\n".join(profile.text(each)) for each in found), file=out)
            print("".join(f"skipped: {line}\n" for line in plan.skipped), end="", file=out, flush=True)
    finally:
        _write(told, output, out, lost)

    return lost


def _measured(plan: Plan, tables: Sequence[str]) -> report.Measured:
    measured = report.Measured()
    if "collectives" in tables:
        measured.collectives = collectives.measure(_served(plan, "group"), _progress)

    if "exchange" in tables:
        served = _served(plan, "store")
        if plan.device == "cpu":
            measured.exchange = exchange.measure(served, _progress)
        elif "processes" in served.ranks_as:
            measured.gpu_exchange = gpu_exchange.measure(plan.device, plan.rounds, plan.sizes, _progress)

    if "own-gpus" in tables and plan.device != "cpu":
        measured.own_gpus = _own_gpus(plan)

    _progress("")
    return measured


def _own_gpus(plan: Plan) -> dict[report.OwnGpus, Series]:
    """Ranks that have a GPU each, where there are so many."""
    results: dict[report.OwnGpus, Series] = {}
    for ranks in plan.ranks:
        devices, gpus = tuple(f"cuda:{rank}" for rank in range(ranks)), torch.cuda.device_count()
        if gpus < ranks:
            plan.skipped.append(f"{ranks} ranks with a GPU each: there are {gpus} GPUs")
            continue

        for how in plan.ranks_as:
            refusal = choose("group", imagine(ranks, how, devices), backend="nccl")[1]
            if refusal is not None:
                plan.skipped.append(f"{ranks} ranks with a GPU each, as {how}: {one_line(str(refusal))}")
                continue

            measured = own_gpus.measure(ranks, how, plan.rounds, plan.sizes, _progress)
            results |= {report.OwnGpus(ranks, how, nbytes): series for nbytes, series in measured.items()}

    return results


def _served(plan: Plan, kind: Kind) -> Plan:
    """The plan without those ranks that nothing installed can serve.

    :raises DtorchError: if none are left.
    """
    ranks_as, refusals = [], []
    for how in plan.ranks_as:
        topology = imagine(2, how, (plan.device,))
        # A group works on a store for the same ranks.
        kinds: set[Kind] = {kind, "store"}
        whys = [refusal for of in sorted(kinds) if (refusal := choose(of, topology)[1]) is not None]
        if whys:
            refusals.append(whys[0])
            plan.skipped.append(f"{kind}, ranks as {how}: {one_line(str(whys[0]))}")
        else:
            ranks_as.append(how)

    if not ranks_as:
        raise refusals[0]

    return replace(plan, ranks_as=ranks_as)


def _write(told: Mapping[str, object], output: Output, out: TextIO, lost: list[str]) -> None:
    text = json.dumps(told, indent=1)
    if output.json == "-":
        print(text, file=out)
    elif output.json is not None:
        with _noted(output.json, lost):
            Path(output.json).write_text(f"{text}\n", encoding="utf-8")


@contextmanager
def _noted(path: str | Path, lost: list[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        lost.append(f"{path} can't be written: {error.strerror or error}")


def _text(
    about: Mapping[str, str], plan: Plan, measured: report.Measured, found: Sequence[report.Goal]
) -> Iterator[str]:
    yield ", ".join(f"{name} {value}" for name, value in about.items())
    yield f"medians of {plan.rounds} rounds, the slowest rank's time; fractions are medians of the rounds' fractions"
    for table in report.tables(measured):
        yield ""
        yield from table

    if found:
        yield ""
        yield from report.goals_table(found)

    if plan.skipped:
        yield ""
        yield from (f"skipped: {line}" for line in dict.fromkeys(plan.skipped))


def _progress(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
