"""Lines that ranks print, each with its rank before it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from dtorch_core import _scope
from dtorch_core._scope import Scope

_KEY = "label"


class LabelledOutput:
    """Stands for ``sys.stdout`` or ``sys.stderr``: writes a rank's text line by line, other threads' as it comes."""

    def __init__(self, outside: TextIO) -> None:
        self.outside = outside
        self._lock = threading.RLock()  # a signal's handler may print, too
        self._unfinished: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Write, with a label where a rank does; its last line waits until it is finished."""
        scope = _scope.current()
        label = None if scope is None else scope.own.get(_KEY)
        with self._lock:
            if label is None:
                return self.outside.write(text)

            *lines, rest = (self._unfinished.get(label, "") + text).split("\n")
            self._unfinished[label] = rest
            if lines:
                self.outside.write("".join(f"{label} {_visible(line)}\n" for line in lines))
                self.outside.flush()

        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As a file's."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """What is no whole line yet stays: another rank's would go into its middle."""
        self.outside.flush()

    def finish(self, label: str) -> None:
        """The rank writes no more."""
        with self._lock:
            rest = self._unfinished.pop(label, "")
            if rest:
                self.outside.write(f"{label} {_visible(rest)}\n")

            self.outside.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self.outside, name)


def _visible(line: str) -> str:
    """What a terminal would show of it: a progress bar writes over itself."""
    return line.rstrip("\r").rpartition("\r")[2]


@contextmanager
def held(stdout: TextIO | None = None) -> Iterator[None]:
    """Ranks print through labels in here.

    :param stdout: where standard output goes.
    """
    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, LabelledOutput):
        yield
        return

    sys.stdout, sys.stderr = LabelledOutput(stdout or before[0]), LabelledOutput(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """What this rank prints has its number before it: ``[rank 2] ...``."""
    label = scope.own[_KEY] = f"[rank {scope.rank}]"
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in streams:
            if isinstance(stream, LabelledOutput):
                stream.finish(label)

        scope.own.pop(_KEY, None)


def tell(text: str) -> None:
    """A line of ours, on standard error and without a label."""
    stream: Any = sys.stderr
    print(text, file=stream.outside if isinstance(stream, LabelledOutput) else stream, flush=True)
