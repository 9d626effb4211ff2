"""The ``dtorch`` command: what is installed, what would be chosen and why, what is broken, what a backend holds.

Whatever a plugin prints while it is loaded or asked goes to stderr: stdout has the command's answer alone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

import dtorch_core
from dtorch_core.cli import _answers, bench, check, doctor, explain, plugins, run
from dtorch_core.errors import DtorchError

COMMANDS = (plugins, explain, doctor, check, run, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Arguments that make no sense: 2. An error of ours: its message, and 1."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or helped
        return int(stop.code or 0)

    stdout = sys.stdout
    try:
        out = _output(options, stdout)
        with contextlib.redirect_stdout(sys.stderr), _quiet_log():
            status: int = options.run(options, out)

        out.flush()
        return status
    except argparse.ArgumentTypeError as error:
        print(f"dtorch {options.command}: error: {error}", file=sys.stderr)
        return 2
    except DtorchError as error:
        if isinstance(error, _answers.LostError):
            _answers.give_up(stdout)

        print(f"dtorch {options.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `dtorch plugins | head -1`: whoever reads has seen enough
        _answers.give_up(stdout)
        return 1
    except KeyboardInterrupt:
        return 130


def _output(options: argparse.Namespace, stdout: TextIO | None) -> TextIO:
    if options.run is not run.run:
        return _answers.answer(stdout)

    # A script's own output: as Python has it, what is printed goes nowhere where standard output is closed.
    return stdout or open(os.devnull, "w", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtorch", description="PyTorch ranks that exchange tensors: the parts that are installed."
    )
    parser.add_argument("--version", action="version", version=f"dtorch-core {dtorch_core.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        summary = (command.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_arguments(sub)
        if getattr(command, "FACTS", True):
            sub.add_argument("--json", action="store_true", help="print the facts as JSON")

        sub.set_defaults(run=command.run)

    return parser


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    # The commands show the problems themselves.
    log, handler = logging.getLogger("dtorch"), logging.NullHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
