"""How messages write ranks, counts and causes: one vocabulary everywhere."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import traceback
from collections.abc import Iterable, Sequence

_MACHINERY = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, importlib.__file__))
"""Where the frames between a caller and a plugin's own line lie: this package, and importing."""


MOST_NAMED = 16
"""A message names no more ranks, or devices, one by one."""


def rank_list(ranks: Iterable[int]) -> str:
    """``"rank 0, rank 2"``; ``"no rank"`` where there is none. Of many, the first and the last, and how many more."""
    named = [f"rank {rank}" for rank in sorted(ranks)]
    if len(named) > MOST_NAMED:
        left = named[MOST_NAMED - 2 : -1]
        named[MOST_NAMED - 2 : -1] = [f"{len(left)} more"]

    return ", ".join(named) or "no rank"


def count(number: int, noun: str) -> str:
    """``"1 rank"``, ``"2 ranks"``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def not_copied(handle: object, how: str) -> TypeError:
    """What ``__reduce__`` of a rank's handle raises; ``how`` says how every rank makes its own."""
    return TypeError(f"{handle!r} belongs to its rank, and can't be pickled or copied: every rank makes its own, {how}")


def seconds(value: float) -> str:
    """A duration in seconds, without noise digits."""
    return f"{value:.3g} s"


def size_text(nbytes: int) -> str:
    """A size in the largest unit that it fills, exact where it is a whole number of them."""
    unit, size = "bytes", float(nbytes)
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1024:
            break

        unit, size = larger, size / 1024

    return f"{size:.4g} {unit}"


def one_line(text: str) -> str:
    """A text of any shape as one line."""
    return " ".join(text.split())


def columns(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """A line for each row, its cells one below the other; the last cell runs on."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [(indent + line).rstrip() for line in padded]


def canonical(name: str) -> str:
    """A distribution's name as pip compares it: ``My_Store`` and ``my-store`` are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'memory'?"`` where a known name is close, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain: what a reader has to mend."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            break

        error = before

    return error


def describe_error(error: BaseException) -> str:
    """Type, message and place of the root cause, on one line. Never raises, whatever class the error is of."""
    cause = root_cause(error)
    # The last frame that is neither ours nor the import machinery's is the line to look at.
    place = next(
        (
            f" ({frame.filename}:{frame.lineno})"
            for frame in reversed(traceback.extract_tb(cause.__traceback__))
            if not frame.filename.startswith(("<", *_MACHINERY)) and "importlib_metadata" not in frame.filename
        ),
        "",
    )
    return f"{_type_and_message(cause)}{place}"


def interruption(rank: int, call: str, error: BaseException) -> str:
    """What the peers of a rank are told that Ctrl-C, or another signal's handler, took out of a call."""
    return f"rank {rank} was interrupted in {call}: {_type_and_message(error)}"


def _type_and_message(error: BaseException) -> str:
    try:
        text = one_line(str(error))
    except Exception:
        text = "its message can't be printed"

    return f"{type(error).__name__}: {text}" if text else type(error).__name__
