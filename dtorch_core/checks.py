"""What a tensor has to be to be exchanged: one rule for every backend. For authors of backends."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtorch_core._meeting import member
from dtorch_core._text import count
from dtorch_core.errors import ProtocolError, UnsupportedTensorError

_MOST = 1 << 20
"""Elements whose places are looked at one by one."""

_SILENT = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class that has nothing to say in calls, as Parameter."""

_QUANTIZED = frozenset(
    value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name.startswith(("qint", "quint"))
)
"""What a view can make of plain integers: torch copies no such tensor, whether it is quantized or not."""

T = TypeVar("T")

LONGEST = 1e8
"""Seconds, more than three years: what every clock that is asked can count. Who wants to wait longer waits so long."""


def check_publish(key: str, tensor: Tensor, get_count: int, world_size: int | None = None) -> None:
    """The rules of :meth:`TensorStore.src_set` that hold for every backend; call it first.

    :param world_size: the store's: a rank gets each publication once, so that there can't be more consumers.
    :raises TypeError: if ``key`` is not a string.
    :raises ProtocolError: if ``get_count`` is below 1, or above ``world_size``.
    :raises UnsupportedTensorError: if it is not a plain, strided, dense tensor; the message says what it is.
    """
    if type(key) is not str:
        check_key("src_set", key)

    if isinstance(get_count, bool) or not isinstance(get_count, int) or get_count < 1:
        raise ProtocolError(f"src_set({key!r}): get_count must be an int of at least 1, not {get_count!r}")

    if world_size is not None and get_count > world_size:
        raise ProtocolError(
            f"src_set({key!r}): get_count is {get_count}, and there are {count(world_size, 'rank')}, each of which "
            f"gets it once: nobody could wait for all of those. Pass how many ranks get it"
        )

    if not _ordinary(tensor):
        check_tensor(f"src_set({key!r})", tensor)


def check_empty(call: str, size: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of memory to be published from; ``call`` opens the message.

    :raises TypeError: if ``size`` is not a sequence of ints, or ``dtype`` no dtype of torch's.
    :raises ValueError: if a size is negative, or all together are more than an address can tell.
    :raises UnsupportedTensorError: if tensors of that dtype can't be carried.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{call}: dtype must be a torch.dtype, not {dtype!r}")

    if dtype in _QUANTIZED:
        raise UnsupportedTensorError(f"{call}: a quantized tensor can't be carried; pass its integers and parameters")

    try:
        sizes = tuple([operator.index(number) for number in size])
    except TypeError:
        raise TypeError(f"{call}: size must be a sequence of ints, as in (2, 3), not {size!r}") from None

    if min(sizes, default=0) < 0:
        raise ValueError(f"{call}: a size can't be negative")

    if math.prod(sizes) * dtype.itemsize > sys.maxsize:
        raise ValueError(f"{call}: no machine has so much memory")

    return sizes


def check_key(call: str, key: str) -> None:
    """Refuse what is no key; any string is one. ``call`` opens the message.

    :raises TypeError: if it is not a string.
    """
    if not isinstance(key, str):
        raise TypeError(f"{call}: a key is a string, not {key!r}")


def check_timeout(call: str, timeout: float) -> float:
    """Seconds that a wait may take, :data:`LONGEST` at most; zero is a look. ``call`` opens the message.

    :raises TypeError: if it is not a number.
    :raises ValueError: if it is negative, infinite or not a number by value.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"{call}: timeout must be a number of seconds, not {timeout!r}")

    if not 0 <= timeout < math.inf:
        raise ValueError(f"{call}: timeout must be a finite number of seconds, at least 0, not {timeout!r}")

    return min(timeout, LONGEST) or 0  # and no negative zero


def check_device(call: str, device: torch.device | str) -> torch.device:
    """The device, with its index where it is a CUDA device; ``call`` opens the message.

    :raises ValueError: if torch does not know it, or it is not on this machine.
    """
    try:
        return torch.device(member.normal_device(device))
    except ValueError as error:
        raise ValueError(f"{call}: {error}") from None


def check_tensor(call: str, tensor: Tensor) -> None:
    """Refuse what can't be exchanged; ``call`` opens the message.

    :raises UnsupportedTensorError: if it is not a plain, strided, dense tensor on the CPU or a CUDA device.
    """
    if _ordinary(tensor):
        return

    if not isinstance(tensor, Tensor):
        raise UnsupportedTensorError(f"{call}: takes a torch.Tensor, not {type(tensor).__name__}")

    kind = type(tensor).__name__
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise UnsupportedTensorError(
            f"{call}: a {kind} holds more than its values and can't be carried; pass a plain tensor "
            f"(of a DTensor: to_local(); of a functional collective's result: wait())"
        )

    if tensor.is_quantized:
        raise UnsupportedTensorError(f"{call}: a quantized tensor can't be carried; pass int_repr() and its parameters")

    if tensor.dtype in _QUANTIZED:
        raise UnsupportedTensorError(
            f"{call}: a tensor of dtype {tensor.dtype} can't be carried; pass its integers, by view() of an integer "
            f"dtype of that size"
        )

    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedTensorError(f"{call}: a {layout} tensor can't be carried; pass its dense parts")

    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedTensorError(f"{call}: a tensor on {tensor.device} can't be exchanged")


def plain_tensor(x: T) -> T:
    """What a call was given, of a subclass of Tensor as the plain tensor that it is: no ``__torch_function__`` of the
    program's runs in what follows. Without its history, as ``x.detach()``.

    What is no tensor stays, and a subclass that holds more than its values: :func:`check_tensor` refuses them. So does
    a Parameter, whose class runs nothing.
    """
    kind: Any = type(x)
    if kind is Tensor or not isinstance(x, Tensor):
        return x

    if kind.__torch_function__ is _SILENT or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x

    with torch._C.DisableTorchFunctionSubclass():
        return x.detach()  # type: ignore[return-value]


def check_written(call: str, tensor: Tensor) -> None:
    """Refuse memory for a result in which elements share memory; ``call`` opens the message.

    :raises UnsupportedTensorError: if they do, as in an expanded tensor, or if :func:`check_tensor` refuses it.
    """
    check_tensor(call, tensor)
    if tensor.is_contiguous() or _apart(tensor):
        return

    kind = "an expanded tensor" if 0 in tensor.stride() else f"a tensor of strides {tuple(tensor.stride())}"
    raise UnsupportedTensorError(f"{call}: can't write to {kind}: its elements share memory; clone it")


def _apart(tensor: Tensor) -> bool:
    """No two elements share memory. Of strides between each other that is said of up to a million elements."""
    dims = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    span = 0
    for step, size in dims:
        if step <= span:
            break

        span += step * (size - 1)
    else:
        return True

    if not tensor.numel():
        return True

    if dims[0][0] == 0 or tensor.numel() > _MOST:
        return False

    places = torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the program's default device is
    for step, size in dims:
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * step

    return int(places.unique().numel()) == tensor.numel()


def _ordinary(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.dtype not in _QUANTIZED
        and not tensor.is_nested
        and (tensor.is_cpu or tensor.is_cuda)
    )
