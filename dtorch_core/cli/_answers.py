"""Where a command's answer goes: standard output. Where it can't go there, one line says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from dtorch_core.errors import DtorchError


class LostError(DtorchError, OSError):
    """An answer that can't be written: no file of a command's own work."""


class Answer:
    """A stream whose failures are told apart from all others."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As a file's.

        :raises LostError: if it can't be written.
        :raises BrokenPipeError: if nobody reads any more.
        """
        with _told():
            return self._stream.write(text)

    def flush(self) -> None:
        """As a file's; it raises what :meth:`write` does."""
        with _told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)


def answer(stream: TextIO | None) -> TextIO:
    """Standard output for a command.

    :raises LostError: if it is closed, as by ``>&-``: what is printed then would go elsewhere.
    """
    if stream is None:
        raise LostError("standard output is closed: there is nowhere to print to; > /dev/null is for seeing nothing")

    wrapped: Any = Answer(stream)
    return wrapped  # type: ignore[no-any-return]


def give_up(stream: TextIO | None) -> None:
    """What is left in its buffer goes nowhere: Python would try once more as it ends, and tell of it."""
    if stream is not None:
        with suppress(OSError, ValueError):  # it has no descriptor: nothing of it is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LostError(f"standard output can't be written: {error.strerror or error}") from error
