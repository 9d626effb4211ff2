"""What travels between the processes of one spawn(): a function and its arguments, results, errors. All by value.

torch's own way to pickle for another process would move a tensor's memory to one that both share. Then a result would
last as long as the process that made it, and an argument would be every rank's to write.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from dtorch_core._spawn.ranks import Failure, is_told, said
from dtorch_core._text import one_line
from dtorch_core.errors import DtorchError

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By the size of an element: a dtype that every operation knows."""

_CHAIN = 8
"""Causes of an error that travel with it."""


class _ByValue(ForkingPickler):  # multiprocessing's queues and locks know how to be pickled by this class alone
    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into, pickle.HIGHEST_PROTOCOL)
        shared = (Tensor, torch.UntypedStorage, torch.TypedStorage)
        kept = {of: reduce for of, reduce in self.dispatch_table.items() if not issubclass(of, shared)}
        self.dispatch_table = {**kept, Tensor: _reduce}


def _reduce(tensor: Tensor) -> Any:  # noqa: ANN401 - as pickle has it
    """The values of a plain tensor: no more of its storage than they need, and no bits that say how to read them."""
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    if tensor.is_quantized or tensor.__dict__:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    values = tensor.detach().resolve_conj().resolve_neg().view(_CARRIERS[tensor.element_size()])
    if values.untyped_storage().nbytes() != values.numel() * values.element_size():
        values = values.clone()

    memory = values.cpu()
    nbytes = memory.untyped_storage().nbytes()
    data = bytearray((ctypes.c_char * nbytes).from_address(memory.untyped_storage().data_ptr())) if nbytes else b""
    where = str(tensor.device), tuple(memory.shape), memory.stride(), memory.storage_offset()
    return _rebuild, (data, memory.dtype, tensor.dtype, tensor.requires_grad, *where)


def _rebuild(
    data: bytearray,
    carrier: torch.dtype,
    dtype: torch.dtype,
    requires_grad: bool,
    device: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> Tensor:
    if data:
        values = torch.frombuffer(data, dtype=carrier).as_strided(shape, stride, offset)
    else:
        values = torch.empty_strided(shape, stride, dtype=carrier)

    return values.to(device).view(dtype).requires_grad_(requires_grad)


def wrap(value: object) -> bytes:
    """Pickle by value."""
    into = io.BytesIO()
    _ByValue(into).dump(value)
    return into.getvalue()


def unwrap(parcel: bytes | bytearray) -> Any:  # noqa: ANN401 - whatever was wrapped
    """The inverse of :func:`wrap`. Only for what a process of the same spawn() has sent."""
    return pickle.loads(parcel)


def unwrap_work(parcel: bytes | bytearray) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What :class:`Work` has sent.

    :raises TypeError: if it is not found here, where the modules were imported anew.
    """
    try:
        fn, args = unwrap(parcel)
    except (AttributeError, ImportError) as error:
        raise TypeError(
            f"spawn: a process of its own does not find what the ranks do: {one_line(str(error))}. It imports the "
            f"modules anew, and the main one not as '__main__': define there what ranks need, outside of "
            f"if __name__ == '__main__':, or use ranks_as='threads'"
        ) from error

    return fn, args


class Work:
    """What every rank does. It stays behind when it is pickled: ``parcel`` is for the line.

    multiprocessing's own objects can be pickled only while a process is started, and belong to the one that is. What
    is pickled then goes through a pipe that holds little until the new interpreter reads it, and the next process
    would not be started before.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._fn, self._args = fn, args
        self.parcel = b""

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            self.parcel = wrap((self._fn, self._args))
        except Exception as error:
            raise TypeError(f"spawn: {self._blame(error)}") from error

        return bytes, ()

    def check(self) -> None:
        """
        :raises TypeError: if it is clear from its name that another process would not find ``fn``.
        """
        name = getattr(self._fn, "__qualname__", "")
        home = sys.modules.get(getattr(self._fn, "__module__", None) or "")
        if "<lambda>" in name:
            raise TypeError(f"spawn: {_named(self._fn)} is a lambda, which can't be pickled. {_WAY_OUT}")

        if "<locals>" in name:
            raise TypeError(f"spawn: {_named(self._fn)} is a local function, which can't be pickled. {_WAY_OUT}")

        if name and home is sys.modules["__main__"] and not (home.__spec__ or getattr(home, "__file__", None)):
            raise TypeError(
                f"spawn: {_named(self._fn)} was typed into an interpreter (or a notebook), where no other process "
                f"finds it. Put it into a module that can be imported, or use ranks_as='threads'"
            )

    def _blame(self, error: Exception) -> str:
        for what, value in (("fn", self._fn), *((f"args[{i}]", arg) for i, arg in enumerate(self._args))):
            try:
                wrap(value)
            except Exception as own:
                return f"{what}, {kind(value)}, can't be pickled for another process: {one_line(said(own))}. {_WAY_OUT}"

        return f"args can't be pickled for another process: {one_line(said(error))}. {_WAY_OUT}"


_WAY_OUT = (
    "ranks_as='processes' needs a function at a module's level, and arguments that can be pickled; "
    "or use ranks_as='threads'"
)


def _named(fn: object) -> str:
    code = getattr(fn, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"fn, {getattr(fn, '__qualname__', fn)}{place},"


def kind(value: object) -> str:
    """``"a list"``, ``"a some.module.Thing"``."""
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")


def wrap_error(error: BaseException) -> bytes:
    """An error as :func:`unwrap_error` reads it, with its causes: also what can't be pickled."""
    chain: list[tuple[str, bytes]] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < _CHAIN:
        try:
            chain.append((said(cause), wrap(cause)))
        except Exception:
            chain.append((said(cause), b""))

        cause = cause.__cause__

    text = "".join(traceback.format_exception(error))
    return pickle.dumps((text, is_told(error), chain))


def unwrap_error(parcel: bytes | bytearray, rank: int, world_size: int, pid: int | None) -> Failure:
    """What became of the rank. An error that can't be built here is a DtorchError with the same text."""
    text, told, chain = pickle.loads(parcel)
    errors = [_built(pickled) or DtorchError(what) for what, pickled in chain]
    for error, cause in zip(errors, errors[1:], strict=False):
        error.__cause__ = cause

    return Failure.told_as(rank, world_size, chain[0][0], text, told, errors[0], f" (pid {pid})")


def _built(parcel: bytes) -> BaseException | None:
    try:
        error = pickle.loads(parcel)
    except Exception:  # it could not be pickled, or its class is not here or wants other arguments
        return None

    return error if isinstance(error, BaseException) else None
