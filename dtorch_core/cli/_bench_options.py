"""Options of ``dtorch bench`` that make no sense, found before anything is measured: it would be lost."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Iterator
from contextlib import suppress

PROFILE = "--profile"
"""Stands for itself where the others stand for a table: it is measured in their place."""

_OF = {
    "--ranks": ("collectives", "own-gpus"),
    "--operations": ("collectives",),
    "--no-gloo": ("collectives",),
    "--plot": ("collectives",),
    "--only": (),
    "--max-bytes": ("collectives", "exchange", "own-gpus"),
}
"""The tables that an option is about; options of everything are not here."""


def check_meant(options: argparse.Namespace) -> None:
    """Refuse what would be left out without a word.

    :raises argparse.ArgumentTypeError: if an option is not about what is measured.
    """
    for option in _given(options):
        if options.profile is not None:
            if option == "--only" or option in _OF:
                raise argparse.ArgumentTypeError(
                    f"{option} is not for {PROFILE}: it measures one operation of one size, by two ranks"
                )
        elif options.only is not None and option != "--only" and options.only not in _OF[option]:
            raise argparse.ArgumentTypeError(
                f"{option} is of {' and '.join(_OF[option])}: not with --only {options.only}"
            )

    if options.profile is not None and len(options.sizes) > 1:
        raise argparse.ArgumentTypeError(f"{PROFILE} measures one size: give --sizes one, not {len(options.sizes)}")

    if options.profile == "barrier" and options.sizes:
        raise argparse.ArgumentTypeError(f"--sizes is not for {PROFILE} barrier: it moves no bytes")


def check_file(option: str, path: str | None) -> None:
    """A file that the results can be written to; what is in it stays until they are.

    :raises argparse.ArgumentTypeError: if it can't be opened, or its name says it is another kind of file.
    """
    if path is None or (option, path) == ("--json", "-"):
        return

    if option == "--plot" and not path.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"--plot writes a PNG: name it so, as in FILE.png, not {path!r}")

    try:
        _open(os.path.realpath(path) if path else path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{option}: {path!r} can't be written: {error.strerror or error}") from error


def _given(options: argparse.Namespace) -> Iterator[str]:
    for option in _OF:
        given = not options.gloo if option == "--no-gloo" else getattr(options, option[2:].replace("-", "_"))
        if given:
            yield option


def _open(path: str) -> None:
    there = os.path.lexists(path)
    if there and not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
        return  # a pipe, say: whoever reads would see its end

    with open(path, "ab"):
        pass

    if not there:
        with suppress(FileNotFoundError):  # somebody else has taken it away
            os.remove(path)
