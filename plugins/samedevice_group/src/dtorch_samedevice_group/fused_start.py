"""Starts a kernel that triton has compiled by CUDA's own call, with arguments that are laid out once.

Triton's way to that call looks at each of 45 arguments, in Python and in C, which takes longer than all the rest of a
small collective. Nothing of that is needed for a kernel whose parameters are addresses and lengths of 8 bytes.

Whether it is such a kernel, CUDA says: how many parameters there are, and how long each one is. Where anything about it
is not as expected, of a triton or a driver that we don't know, triton starts it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64, c_size_t, c_uint, c_void_p
from functools import cache, partial
from typing import Any

LIBRARY = "libcuda.so.1"

_WARP = 32
"""Threads."""
_HIDDEN = 2
"""Parameters that triton may add, of memory for kernels that ask for it. Ours don't: they are null."""
_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel has without asking for more."""
_WIDTH = 8
"""Bytes of a parameter."""


class Kernel:
    """A compiled kernel, called as triton's own: ``kernel[grid](*numbers, *constants, stream=stream)``."""

    def __init__(self, compiled: Any, numbers: int) -> None:  # noqa: ANN401 - triton is untyped
        """
        :param numbers: how many of the arguments are no constants: the first ones.
        :raises AttributeError, TypeError, ValueError, OSError: if it can't be started without triton.
        """
        self._compiled = compiled
        self._numbers = numbers
        about = compiled.metadata
        if about.global_scratch_size or about.profile_scratch_size or about.num_ctas != 1 or about.shared > _SHARED:
            raise ValueError("it needs more than arguments")

        if about.launch_cooperative_grid or about.launch_pdl:
            raise ValueError("it is launched in another way")

        self._function = c_void_p(compiled.function)
        self._hidden = _parameters(self._function) - numbers
        if not 0 <= self._hidden <= _HIDDEN:
            raise ValueError("it has other parameters")

        self._block = [c_uint(size) for size in (_WARP * about.num_warps, 1, 1, about.shared)]

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def start(*args: Any, stream: int) -> None:  # noqa: ANN401
            self.prepared(grid, args)(stream=stream)

        return start

    def prepared(self, grid: Sequence[int], args: Sequence[Any]) -> Start:
        """What starts it with these arguments."""
        launch = partial(_driver().cuLaunchKernel, self._function, *map(c_uint, grid), *self._block)
        numbers = [*args[: self._numbers], *[0] * self._hidden]
        return Start(launch, numbers, partial(self._compiled[grid], *args))


class Start:
    """Queues a kernel on the stream that it is called with."""

    __slots__ = ("_instead", "_launch", "_numbers", "_places")

    def __init__(self, launch: Callable[..., int], numbers: Sequence[int], instead: Callable[..., object]) -> None:
        """
        :param instead: triton's way.
        """
        count = len(numbers)
        self._numbers = (c_int64 * count)(*numbers)  # the driver copies them in every launch
        first = ctypes.addressof(self._numbers)
        self._places = (c_void_p * count)(*range(first, first + count * _WIDTH, _WIDTH))
        self._launch = launch
        self._instead = instead

    def __call__(self, *, stream: int) -> None:
        # A thread may have no context yet: then, as after any other error, nothing was queued. Triton makes one, or
        # says what is wrong.
        if self._launch(c_void_p(stream), self._places, None):
            self._instead(stream=stream)


def quicker(compiled: Any, numbers: int) -> Any:  # noqa: ANN401
    """As :class:`Kernel`; what was given where that can't be."""
    try:
        return Kernel(compiled, numbers)
    except (AttributeError, TypeError, ValueError, OSError):
        return compiled


def _parameters(function: c_void_p) -> int:
    """How many there are, one behind the other.

    :raises ValueError: if one is not as long as expected.
    """
    count, offset, length = 0, c_size_t(), c_size_t()
    while not _driver().cuFuncGetParamInfo(function, c_size_t(count), byref(offset), byref(length)):
        if (offset.value, length.value) != (count * _WIDTH, _WIDTH):
            raise ValueError("a parameter has another size")

        count += 1

    return count


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(LIBRARY)  # its calls let the GIL go: a launch may have to wait for the GPU
