"""Tensors of classes of a program's own."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor


class Loud(Tensor):
    """Whatever torch is asked to do with one is an error of the program's, which nobody else should run into."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # noqa: ANN401
        raise AssertionError(f"the program's __torch_function__ was called, for {func}")


class AlsoLoud(Loud):
    """Another one: torch can't do anything with both."""


LOUD: tuple[type[Tensor], ...] = Loud, AlsoLoud


def loud(tensor: Tensor, rank: int = 0) -> Tensor:
    """The same memory, as a tensor of one of the classes."""
    return tensor.as_subclass(LOUD[rank % len(LOUD)])


def quiet(tensor: Tensor) -> Tensor:
    """The same memory as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


class Wrapper(Tensor):
    """A tensor that holds others, as a DTensor does: its own storage has no values."""

    @classmethod
    def around(cls, inner: Tensor) -> Tensor:
        """A wrapper of ``inner``'s shape."""
        made: Tensor = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # noqa: ANN401
        raise NotImplementedError(f"{func} of a wrapper")
