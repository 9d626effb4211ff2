"""Measure collectives and exchanges beside what one would use instead, and beside the limits of this machine."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from dtorch_core._text import did_you_mean
from dtorch_core.cli._bench_options import check_file, check_meant
from dtorch_core.cli.explain import _count, _device
from dtorch_core.errors import PluginError

FACTS = False
"""Its JSON can go to a file."""

_ROUNDS, _QUICK = 9, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, and where the results go."""
    parser.add_argument("--only", choices=("collectives", "exchange", "own-gpus"), help="this table only")
    parser.add_argument("--device", type=_device, default="cpu", help="that all ranks share: cpu, or cuda:N (cpu)")
    parser.add_argument("--ranks", type=_count, nargs="+", metavar="N", help="world sizes of the collectives (2 4)")
    parser.add_argument("--ranks-as", choices=("threads", "processes"), help="both where not given")
    parser.add_argument(
        "--operations", nargs="+", metavar="NAME", default=(),
        help="of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier (all of them)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", nargs="+", metavar="SIZE", default=(),
        help="of a rank's input, a multiple of 1KiB, as in 64MiB "
        "(1KiB 32KiB 1MiB 8MiB 64MiB 256MiB 1GiB, up to --max-bytes)",
    )  # fmt: skip
    parser.add_argument("--max-bytes", metavar="SIZE", help="the largest size (64MiB; on a GPU 256MiB)")
    parser.add_argument("--rounds", type=_count, metavar="N", help=f"measurements of each subject ({_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"2 ranks, {_QUICK} rounds, three sizes: about a minute")
    parser.add_argument("--gloo", action=argparse.BooleanOptionalAction, default=True, help="Gloo beside them (yes)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE",
        help="every round's seconds as JSON: in place of the tables, or to a file beside them",
    )  # fmt: skip
    parser.add_argument(
        "--profile", nargs="?", const="all_reduce", metavar="NAME",
        help="in place of tables: where the time of a small collective goes, in microseconds of each step (all_reduce)",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE.png", help="a picture of bandwidth over size; needs matplotlib")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure and print; the status is 0 whether goals hold or not, and 1 where a file could not be written."""
    check_meant(options)
    check_file("--plot", options.plot)
    check_file("--json", options.json)

    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('--plot needs matplotlib: pip install "dtorch-core[bench]"')

    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise

        raise PluginError("a benchmark needs torch: pip install torch") from error

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        from dtorch_core.bench import program
        from dtorch_core.bench.cells import MOST_RANKS, OPERATIONS
        from dtorch_core.bench.collectives import Plan

        device = options.device
        if device != "cpu" and int(device.partition(":")[2]) >= torch.cuda.device_count():
            raise argparse.ArgumentTypeError(f"there is no {device}: torch sees {torch.cuda.device_count()} GPUs here")

        if options.only == "own-gpus" and device == "cpu":
            raise argparse.ArgumentTypeError("--only own-gpus needs --device cuda")

        if max(options.ranks or (0,)) > MOST_RANKS:
            raise argparse.ArgumentTypeError(
                f"--ranks: all are threads or processes of this machine, {MOST_RANKS} at most, not {max(options.ranks)}"
            )

        plan = Plan(
            device=device,
            ranks=options.ranks or ((2,) if options.quick else (2, 4)),
            rounds=options.rounds or (_QUICK if options.quick else _ROUNDS),
            ranks_as=(options.ranks_as,) if options.ranks_as else ("threads", "processes"),
            gloo=options.gloo,
            operations=_operations(options.operations, OPERATIONS, "--operations"),
            sizes=_sizes(options),
        )
        output = program.Output(options.json, None if options.plot is None else Path(options.plot))
        if options.profile is not None:
            (operation,) = _operations([options.profile], OPERATIONS, "--profile")
            lost = program.run_profile(plan, operation, output, out)
        else:
            lost = program.run(plan, (options.only,) if options.only else program.TABLES, output, out)

    for line in lost:
        print(f"dtorch bench: {line}", file=sys.stderr)

    return 1 if lost else 0


def _operations(names: Sequence[str], known: Sequence[str], option: str) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"{option}: there is no {name!r}.{did_you_mean(name, known)} There are: {', '.join(known)}"
            )

    return [name for name in known if not names or name in names]


def _sizes(options: argparse.Namespace) -> Sequence[int]:
    from dtorch_core.bench import sizes

    try:
        asked = sorted({sizes.parse(text) for text in options.sizes})
        largest = None if options.max_bytes is None else sizes.parse(options.max_bytes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

    if largest is None:
        largest = max(asked, default=sizes.LARGEST[options.device.partition(":")[0]])

    known = asked or (sizes.QUICK if options.quick else sizes.SIZES)
    chosen = [nbytes for nbytes in known if nbytes <= largest]
    if not chosen:
        raise argparse.ArgumentTypeError(f"no size is left: all are larger than {sizes.size(largest)}")

    return chosen
