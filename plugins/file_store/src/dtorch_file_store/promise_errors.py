"""Errors that go from process to process: as they are where that can be, and in words in any case."""

from __future__ import annotations

import pickle
import traceback

from dtorch_core.errors import DtorchError


class RemoteError(DtorchError, RuntimeError):
    """An error of another process, of a type that can't be made again here. The message has its type and text."""

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        """The type's name with its module, as ``"package.module.SomeError"``."""


def words_of(error: BaseException) -> tuple[str, list[str], bytes]:
    """The type's name, its text and traceback (empty if it was never raised), and it pickled (empty if it can't be)."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error)
    except Exception:
        text = "its message can't be printed"

    trace = ""
    if error.__traceback__ is not None or error.__cause__ is not None or error.__context__ is not None:
        try:
            trace = "".join(traceback.format_exception(error))
        except Exception:
            trace = "its traceback can't be printed"

    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = b""

    return name, [text, trace], pickled


def error_of(name: str, text: list[str], pickled: bytes, sender: str) -> BaseException:
    """The error that ``words_of`` took apart in a process of this user: only of such a one may it be unpickled."""
    message, trace = text
    error = _unpickled(name, pickled) if pickled else None
    if error is None:
        what = "its type can't be pickled there" if not pickled else "its type can't be unpickled here"
        error = RemoteError(f"{sender} raised {name}: {message} ({what})", name)

    if trace:
        error.add_note(f"In {sender}:\n{trace.rstrip()}")

    return error


def _unpickled(name: str, pickled: bytes) -> BaseException | None:
    try:
        error = pickle.loads(pickled)
    except BaseException:  # code of the type's own author runs there
        return None

    return error if isinstance(error, BaseException) else None
