"""Look over this environment: torch, devices, variables, plugins, metadata, and what would be chosen here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import dtorch_core
from dtorch_core import recorder
from dtorch_core._selection import catalogue
from dtorch_core._selection import registry as _registry
from dtorch_core._selection import topology as _topology
from dtorch_core._selection.authority import VARIABLES
from dtorch_core._selection.discovery import guarded
from dtorch_core._selection.reasons import KINDS
from dtorch_core._selection.selector import choose
from dtorch_core._selection.topology import Topology
from dtorch_core._text import columns, count, describe_error, one_line
from dtorch_core.cli import _installations
from dtorch_core.cli._variables import meaning
from dtorch_core.cli.plugins import problems as problems_of
from dtorch_core.cli.run import SHARED
from dtorch_core.errors import PluginError

OLDEST_TORCH = (2, 11)


@dataclass
class Finding:
    """One part of the report."""

    facts: Any = None
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command takes no argument of its own."""


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print the report, part by part; the status is 1 if something is broken."""
    findings: dict[str, Finding] = {}
    for title, look in PARTS.items():
        # Printed as it comes, plugins before torch: if a part ends this process, the last title says which.
        if not options.json:
            print(f"{title}", file=out, flush=True)

        found, error = guarded(look)
        if found is None:
            found = Finding(problems=[f"this part of the report failed: {error and describe_error(error)}"])

        findings[title] = found
        if not options.json:
            for line in [*found.lines, *(f"PROBLEM: {problem}" for problem in found.problems)]:
                print(f"  {line}", file=out, flush=True)

    problems = [problem for finding in findings.values() for problem in finding.problems]
    if options.json:
        facts = {title: finding.facts for title, finding in findings.items()}
        print(json.dumps({**facts, "problems": problems}, indent=2), file=out)
    else:
        print(count(len(problems), "problem") if problems else "no problem found", file=out)

    return 1 if problems else 0


def _python() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "dtorch-core": f"{dtorch_core.__version__} ({os.path.dirname(dtorch_core.__file__)})",
        "cores for this process": cores,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }
    omp = facts["OMP_NUM_THREADS"] or "not set: spawn() divides the cores among its ranks"
    return Finding(facts, columns([(name, str(value)) for name, value in {**facts, "OMP_NUM_THREADS": omp}.items()]))


def _environment() -> Finding:
    values = {name: value for name, value in sorted(os.environ.items()) if name.startswith("DTORCH_")}
    rows = [(f"{name}={value}", meaning(name, value)) for name, value in values.items()]
    return Finding(values, columns(rows) or ["no DTORCH variable is set"])


def _plugins() -> Finding:
    known = _registry.inspect()
    listing = known.listing()
    rows = [(plugin.name, plugin.state, plugin.label, plugin.why) for plugin in listing]
    broken = [f"plugin {p.name!r} of {p.label} is broken: {p.why}" for p in listing if p.state == "broken"]
    missing = [kind for kind in KINDS if not any(plugin.names(kind) for plugin in known.plugins)]
    hints = [catalogue.install_hint(kind) for kind in missing]
    return Finding(
        [plugin.to_dict() for plugin in listing],
        [*columns(rows), *hints] if listing else ["no plugin is installed"],
        broken + problems_of(known) + ([] if listing else hints),  # alone, the core can open nothing
    )


def _metadata() -> Finding:
    problems = _installations.stale()
    return Finding(problems, [] if problems else ["each distribution is there once, and up to date"], problems)


def _torch() -> Finding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that NumPy is missing, for one
        try:
            import torch
        except ModuleNotFoundError as error:
            if error.name == "torch":
                return Finding({"torch": None}, [], ["torch is not installed: pip install torch"])

            raise

        devices = [
            f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())
        ]

    facts = {
        "torch": f"{torch.__version__} ({os.path.dirname(torch.__file__)})",
        "CUDA": torch.version.cuda,
        "devices": devices,
        "intra-op threads": torch.get_num_threads(),
    }
    rows = [
        ("torch", str(facts["torch"])),
        ("CUDA", torch.version.cuda or "this torch is built without it"),
        ("devices", ", ".join(["cpu", *devices])),
        ("intra-op threads", str(facts["intra-op threads"])),
    ]
    old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH
    needed = ".".join(map(str, OLDEST_TORCH))
    return Finding(facts, columns(rows), [f"torch {torch.__version__} is older than {needed}"] if old else [])


def _torch_distributed() -> Finding:
    """What this torch lacks to serve groups of dtorch. No problem: what else it has works."""
    if sys.modules.get("torch") is None:
        return Finding(None, ["torch is not installed"])

    from dtorch_core._groups import torch_kernels
    from dtorch_core._groups import torch_state as _torch_state
    from dtorch_core.torch_backends import DEVICES

    # Missed when a backend was registered, or would be.
    lacks = [*dict.fromkeys([*_torch_state.missed, *_torch_state.missing(), *torch_kernels.missing(DEVICES)])]
    return Finding(lacks, [one_line(lack) for lack in lacks] or ["nothing that groups of dtorch need is missing"])


def _ranks_as_threads() -> Finding:
    """Whether this torch can be divided among threads, and what they share all the same."""
    if sys.modules.get("torch") is None:
        return Finding(None, ["torch is not installed"])

    from dtorch_core._thread_ranks import random
    from dtorch_core._thread_ranks import worlds as _thread_world

    facts = {"torch.distributed": _thread_world.MISSING, "random numbers": random.MISSING}
    rows = [(f"{what} of each rank's own", "; ".join(lacks) or "yes") for what, lacks in facts.items()]
    rows += [(f"shared: {what}", which) for what, which in SHARED.items()]
    missed = {what: "; ".join(lacks) for what, lacks in facts.items() if lacks}
    problems = [f"ranks that are threads can't have {what} of their own: {lacks}" for what, lacks in missed.items()]
    return Finding({**facts, "shared": SHARED}, columns(rows), problems)


def _selection() -> Finding:
    try:
        _registry.registry()
    except PluginError as error:  # a problem that the plugins' part has named
        return Finding(None, [f"nothing is chosen: {one_line(str(error))}"])

    facts: dict[str, Any] = {}
    rows = []
    problems: dict[str, None] = {}
    for topology in _here():
        chosen: list[str] = []
        for kind in KINDS:
            selection, refusal = choose(kind, topology)
            # A group may open a store over its ranks; whether it does is not known before.
            storeless = kind == "group" and selection.chosen is not None and chosen[0] == "store: none"
            chosen.append(f"{kind}: {selection.chosen or 'none'}{' (if it needs no store)' if storeless else ''}")
            facts.setdefault(topology.summary(), {})[kind] = selection.chosen
            asked = os.environ.get(VARIABLES[kind], "").strip()
            # Not to fit some ranks is no fault of a backend; not to be usable at all is.
            verdict = selection.verdict(asked)
            if asked and refusal is not None and (verdict is None or verdict.state != "no"):
                problems[one_line(str(refusal))] = None

        rows.append((topology.summary(), *chosen))

    return Finding(facts, columns(rows), list(problems))


def _reports() -> Finding:
    """What plugins say of themselves."""
    known = _registry.inspect()
    before = len(known.problems)
    facts = {plugin.label: lines for plugin, lines in known.call("dtorch_doctor", {}, _checked_lines)}
    lines = [f"{label}: {line}" for label, lines in facts.items() for line in lines]
    return Finding(facts, lines or ["no plugin has anything to report"], known.problems[before:])


def _checked_lines(result: object) -> list[str]:
    lines = None if isinstance(result, str) or not isinstance(result, Iterable) else list(result)
    if lines is None or not all(isinstance(line, str) for line in lines):
        raise PluginError(f"must return lines of text in a list, not {result!r}")

    return [one_line(line) for line in lines]


def _calls() -> Finding:
    """Of the groups in this process; a program may call :func:`run` itself."""
    known = recorder.recorders()
    size = os.environ.get(recorder.VARIABLE, "").strip()
    off = f"off; set {recorder.VARIABLE}=N to see the last N calls of every rank in errors"
    lines = [line for each in known for line in f"group {each.group!r}, {each}".splitlines()]
    facts = [
        {"group": each.group, "rank": each.rank, "world size": each.world_size, "calls": list(map(str, each.entries()))}
        for each in known
    ]
    return Finding(facts, lines or [f"no group in this process; {size} calls are kept" if size else off])


def _here() -> Iterator[Topology]:
    """Typical ranks on this machine."""
    yield _topology.imagine(2, "threads")
    yield _topology.imagine(2, "processes")
    torch = sys.modules.get("torch")  # its own part of the report has imported it, or said why it can't
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count() if torch is not None else 0)]
    if devices:
        yield _topology.imagine(2, "threads", ("cuda:0",))

    if len(devices) > 1:
        yield _topology.imagine(len(devices), "threads", devices)
        yield _topology.imagine(len(devices), "processes", devices)


PARTS: dict[str, Callable[[], Finding]] = {
    "system": _python,
    "environment": _environment,
    "plugins": _plugins,
    "metadata": _metadata,
    "torch": _torch,
    "torch.distributed": _torch_distributed,
    "ranks as threads": _ranks_as_threads,
    "selection": _selection,
    "reports": _reports,
    "flight recorder": _calls,
}
"""The parts of the report, in this order."""
