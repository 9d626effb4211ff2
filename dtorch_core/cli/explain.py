"""Show which backend would be chosen for some ranks, and why; they need not exist here."""

from __future__ import annotations

import argparse
import json
import re
from typing import TextIO

from dtorch_core._selection import topology as _topology
from dtorch_core._selection.reasons import KINDS, Kind, Selection
from dtorch_core._selection.selector import choose, spec_of
from dtorch_core._selection.topology import Topology
from dtorch_core._text import one_line
from dtorch_core.errors import DtorchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The ranks to choose for."""
    parser.add_argument("--kind", choices=KINDS, help="all three where not given")
    parser.add_argument("--ranks", type=_count, default=2, metavar="N", help="how many (2)")
    parser.add_argument("--ranks-as", choices=("threads", "processes"), default="threads", help="(threads)")
    parser.add_argument("--threads-per-process", type=_count, default=1, metavar="N", help="with processes (1)")
    parser.add_argument("--hosts", type=_count, default=1, metavar="N", help="that the ranks are dealt over (1)")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--device", type=_device, help="of all ranks: cpu, or cuda:N (cpu)")
    devices.add_argument("--devices", type=_devices, metavar="DEVICE,...", help="one for each rank")
    parser.add_argument("--backend", metavar="NAME", help="as if it were asked for by argument; needs --kind")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print each choice, or why there is none; the status is 0 if there is one everywhere."""
    if options.backend is not None and options.kind is None:
        raise argparse.ArgumentTypeError("--backend names a backend of one kind: say which with --kind")

    topology = imagined(options)
    kinds: tuple[Kind, ...] = KINDS if options.kind is None else (options.kind,)
    choices = {kind: choose(kind, topology, backend=options.backend) for kind in kinds}
    # A group may open a store over its ranks; whether it does is its own matter, and not known before.
    store, lacks = None, ""
    if options.kind == "group" and choices["group"][1] is None:
        store = choose("store", topology)
        if store[1] is None:
            lacks = spec_of(choices["group"][0]).store_lacks(spec_of(store[0]))

    if options.json:
        facts = {kind: _to_dict(*choice) for kind, choice in choices.items()}
        if store is not None:
            facts["group"]["store"] = _to_dict(*store) | {"lacks": lacks}

        print(json.dumps(facts if options.kind is None else facts[options.kind], indent=2), file=out)
    else:
        print("\n\n".join(_text(*choice) for choice in choices.values()), file=out)
        if store is not None:
            print(f"a store for the same ranks: {_store(*store, lacks)}", file=out)

    return 0 if not lacks and all(refusal is None for _, refusal in choices.values()) else 1


def imagined(options: argparse.Namespace) -> Topology:
    """The ranks that the arguments describe."""
    if options.threads_per_process != 1 and options.ranks_as != "processes":
        raise argparse.ArgumentTypeError("--threads-per-process is for --ranks-as processes")

    devices = options.devices or (options.device or "cpu",)
    try:
        return _topology.imagine(
            options.ranks, options.ranks_as, devices, options.hosts, options.threads_per_process
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _text(selection: Selection, refusal: DtorchError | None) -> str:
    table, refused = str(selection), "" if refusal is None else str(refusal)
    # A refusal for want of any that fits begins with the table.
    return refused if refused.startswith(table) else f"{table}\n{refused}".rstrip()


def _store(selection: Selection, refusal: DtorchError | None, lacks: str) -> str:
    if refusal is None:
        return f"{selection.chosen}, but {lacks}. Use another one" if lacks else str(selection.chosen)

    noes = [f"{verdict.name}: {verdict.why}" for verdict in selection.verdicts if verdict.state in ("no", "broken")]
    why = "; ".join(noes) if noes and selection.asked_by == "score" else one_line(str(refusal))
    return f"none ({why}). A group that opens one can't be opened here"


def _to_dict(selection: Selection, refusal: DtorchError | None) -> dict[str, object]:
    return {**selection.to_dict(), "refusal": None if refusal is None else str(refusal)}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not {text!r}")

    return int(text)


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"devices are cpu and cuda:N, not {text!r}")

    return "cuda:0" if text == "cuda" else text


def _devices(text: str) -> tuple[str, ...]:
    return tuple(_device(device.strip()) for device in text.split(","))
