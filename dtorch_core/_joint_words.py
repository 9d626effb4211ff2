"""What ranks say to each other about joint work: JSON in a tensor of bytes, and errors as their type's name and text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtorch_core import errors
from dtorch_core.errors import DtorchError

if TYPE_CHECKING:
    from torch import Tensor

    from dtorch_core.store import TensorStore


def say(store: TensorStore, key: str, words: dict[str, Any], get_count: int) -> None:
    """To ``get_count`` ranks."""
    data = bytearray(json.dumps(words).encode())
    store.src_set(key, torch.frombuffer(data, dtype=torch.uint8), get_count)


def hear(store: TensorStore, key: str, timeout: float | None = None) -> dict[str, Any]:
    """Wait until it is said; the store's timeout where None."""
    with store.borrow(key, timeout=timeout) as words:
        return read(words)


def read(words: Tensor) -> dict[str, Any]:
    """What a borrowed tensor says."""
    said: dict[str, Any] = json.loads(bytes(words.tolist()))
    return said


def end_words(
    error: BaseException | None = None, notes: Sequence[str] = (), *, dead: str = "", taken: bool = False
) -> dict[str, Any]:
    """What rank 0 tells the others.

    :param dead: who gave up, so that the work was not done.
    :param taken: rank 0 has finished what the others published for it.
    """
    return {**described(error), "notes": list(notes), "dead": dead, "taken": taken}


def described(error: BaseException | None) -> dict[str, str]:
    """An error, or none, as a part of words."""
    return {"error": type(error).__name__ if error is not None else "", "text": str(error or "")}


def rebuilt(words: dict[str, Any]) -> Exception:
    """The error of another rank, as far as its type is one of ours."""
    name, text = words["error"], words["text"]
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, DtorchError):
        return kind(text)

    return DtorchError(f"{name}: {text}")
