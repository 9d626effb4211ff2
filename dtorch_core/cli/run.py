"""Run a torchrun script, unmodified, with several ranks on one device."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.machinery import PathFinder
from typing import TextIO

from dtorch_core._text import did_you_mean
from dtorch_core.cli.explain import _count, _device
from dtorch_core.errors import RankFailedError

FACTS = False
"""It prints what the script prints."""

SHARED = {
    "imported modules": "their variables and caches; a script's own __main__ is each rank's",
    "libraries that note who they are": "take processes, for pytorch-ignite for one; accelerate is taken care of",
    "the process": "os.getpid, limits, sys.path, sys.argv, the working directory",
    "the main thread": "no rank is it",
    "settings of torch": "default dtype, backend flags, deterministic algorithms, number of threads",
    "random numbers beside torch's": "random, numpy.random",
    "warnings and logging": "a warning shown once is shown for one rank; logging.basicConfig is the first rank's",
    "the environment in C": "what a rank sets in os.environ, C code and child processes see as the last rank set it",
    "output that Python does not write": "it has no label",
    "compiled code": "torch.compile's caches and its limit of recompilations",
    "tracing": "torch.export, torch.fx: ranks take turns",
    "profiler": "one rank at a time",
    "exit handlers": "atexit: they run when all ranks have ended, and have no process group",
    "forked children": "may wait for what other ranks held; DataLoader: multiprocessing_context='forkserver'",
    "symmetric memory and RPC": "for processes alone, as is AsyncCheckpointerType.PROCESS",
}
"""What ranks that are threads can't have apart, and what that is about."""

_ENDED = re.compile(r"rank \d+ of \d+ \(pid \d+\) ended with exit status (\d+)")
"""How an error begins that tells of a process that said nothing itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The script, and where it runs."""
    number = ("--nproc", "--nproc-per-node", "--nproc_per_node")
    parser.add_argument(*number, dest="nproc", type=_count, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--ranks-as", choices=("threads", "processes"), default="threads", help="(threads)")
    parser.add_argument("--device", type=_device, help="of all ranks: cpu, or cuda:N (the first GPU if there is one)")
    parser.add_argument(
        "--nccl-as", default="dtorch", metavar="NAME",
        help="the backend of groups for which the script asks for nccl or gloo (dtorch: the one that fits)",
    )  # fmt: skip
    parser.add_argument("--rng", choices=("per-rank", "shared"), default="per-rank", help="random numbers (per-rank)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run it. The status is the script's: 0, that of the rank that failed first, or 128 and a signal that ended it."""
    if options.module:
        _check_module(options.script)
    elif not os.path.isfile(options.script):
        raise argparse.ArgumentTypeError(f"there is no file {options.script!r}")

    import torch

    from dtorch_core._spawn import output as _rank_output
    from dtorch_core._spawn import passed_signals
    from dtorch_core._spawn import script as _script
    from dtorch_core._spawn.settings import Settings
    from dtorch_core.launcher import launched

    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and int(device.partition(":")[2]) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"there is no {device}: torch sees {torch.cuda.device_count()} GPUs here")

    script = _script.Script(
        options.script, options.module, tuple(options.arguments), _backend(options.nccl_as), options.nproc, _free_port()
    )
    settings = Settings(options.nproc, True, options.rng == "per-rank", options.ranks_as == "threads", script)
    places = dict.fromkeys(range(options.nproc), device)
    with ExitStack() as stack:
        stack.enter_context(_rank_output.held(out))
        heard = stack.enter_context(passed_signals.passed_on()) if options.ranks_as == "processes" else []
        try:
            launched(_script.run, (script,), places, settings, options.ranks_as)
        except RankFailedError as error:
            status = _status(error, heard)
            print(_told(error, status), file=sys.stderr)
            return status

    return 0


def _check_module(name: str) -> None:
    """Its package is there. Whether the rest is, the ranks see: to look for it is to import the package."""
    package = name.partition(".")[0]
    here = os.getcwd()  # where python -m looks first
    nameless = package in ("", "__main__")  # the latter is this program
    if nameless or not (importlib.util.find_spec(package) or PathFinder.find_spec(package, [here])):
        raise argparse.ArgumentTypeError(
            f"there is no module {package or name!r}, neither installed nor in {here}: -m takes a name as in "
            f"python -m, and a file is given without it"
        )


def _backend(name: str) -> str:
    """A name that c10d has, or that of a group backend that is installed."""
    from torch.distributed import Backend

    from dtorch_core import torch_backends
    from dtorch_core._selection.registry import registry

    known = [torch_backends.ANY, *registry().offers("group")]
    if name not in (*known, *Backend.backend_list):
        raise argparse.ArgumentTypeError(
            f"--nccl-as: there is no group backend {name!r}.{did_you_mean(name, known)} Installed: {', '.join(known)}"
        )

    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _status(error: RankFailedError, heard: Sequence[signal.Signals]) -> int:
    """As Python ends a program that raised this; as a shell tells it, if one of the signals has killed the rank."""
    cause = error.__cause__
    if isinstance(cause, SystemExit):
        return cause.code & 0xFF if isinstance(cause.code, int) else 1

    if cause is not None:
        return 1

    for number in heard:
        if f"killed by {number.name}" in str(error):
            return 128 + number

    ended = _ENDED.match(str(error))  # by os._exit, or in C
    return int(ended[1]) or 1 if ended else 1


def _told(error: RankFailedError, status: int) -> str:
    """How the run failed. Python tells no traceback of a program that asked for its end, and prints what it gave."""
    cause = error.__cause__
    if not isinstance(cause, SystemExit):
        return f"dtorch run: {error}"

    from dtorch_core._spawn.ranks import said

    headline = str(error).partition(f"\n\nTraceback of rank {error.rank}")[0]
    lines = [] if cause.code is None or isinstance(cause.code, int) else str(cause.code).splitlines()
    headline = headline.replace(f"failed with {said(cause)}", f"ended with exit status {status}", 1)
    return "\n".join([*(f"[rank {error.rank}] {line}" for line in lines), f"dtorch run: {headline}"])
