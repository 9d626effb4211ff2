"""Launches the fused kernels: each variant is compiled once, then started with as little Python as triton allows.

Where triton can't do it (no C compiler, a GPU that is too old, another interface than we know), that is said once, and
torch's own kernels do the work for the rest of the process.
"""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dtorch_samedevice_group.fused_start import prepared, quicker

VARIABLE = "DTORCH_FUSED"
"""The environment variable that turns fused kernels off, where it is ``0``. Read once in a process."""

MOST = 16
"""Inputs, and outputs, that a kernel takes."""

BLOCK_BYTES = 4096
"""What one block of threads moves of each tensor."""

WARPS = 8
"""Threads of a block, in 32s. (Measured on an H200: blocks of 4 to 32 KiB and 4 to 16 warps differ by 6 % at 256 MiB,
and small collectives are fastest with small blocks.)"""

Grid = tuple[int, int, int]
"""Blocks of threads, in each dimension."""

Launch = tuple[int, Callable[..., object]]
"""A device, and what queues a kernel on the stream that it is given."""

Variant = tuple[Any, ...]
"""What a kernel is compiled for: its name, then what :func:`dtorch_samedevice_group.fused_kernels.variant` takes."""

_nothing = nullcontext()

_OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
"""A product that is added is rounded before: so does torch, and so do ranks on the CPU."""

_UNUSED = [(0,) * (MOST - used) for used in range(MOST + 1)]


class Launcher:
    """The compiled kernels of this process."""

    def __init__(self) -> None:
        self.usable = os.environ.get(VARIABLE, "").strip() != "0" and not torch.version.hip
        self._compiled: dict[tuple[int, Variant], tuple[Any, tuple[object, ...]]] = {}
        self._compiling = threading.Lock()
        self._here = _Here()

    @contextmanager
    def noting(self) -> Iterator[list[Launch]]:
        """What this thread launches meanwhile: all of it, the launch that comes with compiling too."""
        before, self._here.launches = self._here.launches, []
        try:
            yield self._here.launches
        finally:
            self._here.launches = before

    def repeat(self, launch: Launch) -> bool:
        """Queue a kernel once more, on the current stream. As :meth:`launch`."""
        device, start = launch
        try:
            if torch._C._cuda_getDevice() == device:  # as a rule
                start(stream=torch._C._cuda_getCurrentRawStream(device))
            else:
                with torch.cuda.device(device):
                    start(stream=torch._C._cuda_getCurrentRawStream(device))
        except Exception as error:
            self._give_up(error)
            return False

        return True

    def launch(
        self,
        variant: Variant,
        device: int,
        grid: Grid,
        inputs: Sequence[int],
        outputs: Sequence[int],
        length: int,
        in_step: int = 0,
        out_step: int = 0,
    ) -> bool:
        """Queue one kernel on the device's current stream. False if that can't be done: then nothing was queued."""
        numbers = (
            *inputs,
            *_UNUSED[len(inputs)],
            *outputs,
            *_UNUSED[len(outputs)],
            length,
            in_step,
            out_step,
        )
        try:
            with _on(device):
                return self._launch((device, variant), grid, numbers)
        except Exception as error:
            self._give_up(error)
            return False

    def _launch(self, key: tuple[int, Variant], grid: Grid, numbers: tuple[int, ...]) -> bool:
        known = self._compiled.get(key)
        if known is None:
            if torch.cuda.is_current_stream_capturing():
                return False  # a kernel can't be loaded then

            self._first(key, grid, numbers)
            self._note(key[0], prepared(*self._compiled[key], grid, numbers))
            return True

        compiled, constants = known
        stream = torch._C._cuda_getCurrentRawStream(key[0])
        start = prepared(compiled, constants, grid, numbers)
        try:
            start(stream=stream)
        except TypeError:  # it takes other arguments than we know: nothing was queued
            if isinstance(compiled, _Slow):
                raise

            slow = self._slow(key[1])
            self._compiled[key] = slow, constants
            start = prepared(slow, constants, grid, numbers)
            start(stream=stream)

        self._note(key[0], start)
        return True

    def _note(self, device: int, start: Callable[..., object]) -> None:
        if self._here.launches is not None:
            self._here.launches.append((device, start))

    def _first(self, key: tuple[int, Variant], grid: Grid, numbers: tuple[int, ...]) -> None:
        from dtorch_samedevice_group import fused_kernels  # takes long to import, and may be of no use here

        slow = self._slow(key[1])
        constants = fused_kernels.variant(*key[1])[1]
        with self._compiling:  # triton's compiler is not made for several threads
            slow.compile((*numbers, *constants))

        compiled = slow.start(grid, (*numbers, *constants))  # may have to wait for the GPU: with no lock
        self._compiled[key] = quicker(compiled, len(numbers)) if _takes_stream(compiled) else slow, constants

    def _slow(self, variant: Variant) -> _Slow:
        from dtorch_samedevice_group import fused_kernels

        return _Slow(fused_kernels.variant(*variant)[0])

    def _give_up(self, error: Exception) -> None:
        first, self.usable = self.usable, False
        if first and not (isinstance(error, ModuleNotFoundError) and error.name == "triton"):
            warnings.warn(
                f"dtorch-samedevice-group: fused kernels can't be used in this process, and torch's kernels do their "
                f"work, with the same results but more slowly: {type(error).__name__}: {error}. Triton needs a C "
                f"compiler, and a folder for its cache (TRITON_CACHE_DIR). {VARIABLE}=0 in the environment turns fused "
                f"kernels off",
                RuntimeWarning,
                stacklevel=2,
            )


def _on(device: int) -> AbstractContextManager[object]:
    return _nothing if torch._C._cuda_getDevice() == device else torch.cuda.device(device)


class _Here(threading.local):
    """What this thread notes."""

    launches: list[Launch] | None = None


class _Slow:
    """The way through triton's front door, which looks at every argument: 20 to 50 us a launch."""

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 - triton is untyped
        self._kernel = kernel

    def __getitem__(self, grid: Grid) -> Any:  # noqa: ANN401
        def run(*args: object, stream: int) -> None:
            self.start(grid, args)  # on the current stream, which is that one

        return run

    def compile(self, args: tuple[object, ...]) -> None:
        """Compile it, where that has not been done; nothing is launched."""
        self._kernel.warmup(*args, grid=(1, 1, 1), **_OPTIONS)

    def start(self, grid: Grid, args: tuple[object, ...]) -> Any:  # noqa: ANN401
        """Launch, and return the compiled kernel."""
        return self._kernel[grid](*args, **_OPTIONS)


def _takes_stream(compiled: Any) -> bool:  # noqa: ANN401
    """It can be launched by itself, as triton 3.6 does."""
    try:
        return "stream" in inspect.signature(compiled[(1, 1, 1)]).parameters
    except Exception:  # whatever it is: the kernel has been queued, and is not to be done again
        return False


launcher = Launcher()
