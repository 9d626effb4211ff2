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
    """A compiled kernel that the driver can start."""

    def __init__(self, compiled: Any, numbers: int) -> None:  # noqa: ANN401 - triton is untyped
        """
        :param numbers: how many of the arguments are no constants: the first ones.
        :raises AttributeError, TypeError, ValueError, OSError: if it can't be started without triton.
        """
        about = compiled.metadata
        if about.global_scratch_size or about.profile_scratch_size or about.num_ctas != 1 or about.shared > _SHARED:
            raise ValueError("it needs more than arguments")

        if about.launch_cooperative_grid or about.launch_pdl:
            raise ValueError("it is launched in another way")

        function = c_void_p(compiled.function)
        self.by_triton = compiled
        self.hidden = _parameters(function) - numbers
        """Parameters behind the numbers."""
        if not 0 <= self.hidden <= _HIDDEN:
            raise ValueError("it has other parameters")

        self.launch = partial(_driver().cuLaunchKernel, function)
        self.block = [c_uint(size) for size in (_WARP * about.num_warps, 1, 1, about.shared)]


class Start:
    """Queues a kernel on the stream that it is called with."""

    __slots__ = ("_args", "_grid", "_kernel", "_launch", "_numbers", "_places")

    def __init__(
        self, kernel: Kernel, grid: Sequence[int], numbers: Sequence[int], constants: Sequence[object]
    ) -> None:
        values = *numbers, *[0] * kernel.hidden
        count = len(values)
        self._numbers = (c_int64 * count)(*values)  # the driver copies them in every launch
        first = ctypes.addressof(self._numbers)
        self._places = (c_void_p * count)(*range(first, first + count * _WIDTH, _WIDTH))
        self._launch = partial(kernel.launch, *map(c_uint, grid), *kernel.block)
        self._kernel, self._grid, self._args = kernel, grid, (*numbers, *constants)

    def __call__(self, *, stream: int) -> None:
        # A thread may have no context yet: then, as after any other error, nothing was queued. Triton makes one, or
        # says what is wrong.
        if self._launch(c_void_p(stream), self._places, None):
            self._kernel.by_triton[self._grid](*self._args, stream=stream)


def quicker(compiled: Any, numbers: int) -> Any:  # noqa: ANN401
    """As :class:`Kernel`; what was given where that can't be."""
    try:
        return Kernel(compiled, numbers)
    except (AttributeError, TypeError, ValueError, OSError):
        return compiled


def prepared(
    compiled: Any,  # noqa: ANN401
    constants: Sequence[object],
    grid: Sequence[int],
    numbers: Sequence[int],
) -> Callable[..., object]:
    """What queues it with these arguments, often: it is called with the stream."""
    if isinstance(compiled, Kernel):
        return Start(compiled, grid, numbers, constants)

    return partial(compiled[grid], *numbers, *constants)


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
