"""A kernel that triton has compiled, started by CUDA's own call, or by triton where it is not as expected."""

from ctypes import c_int64
from types import SimpleNamespace

import pytest
from dtorch_samedevice_group import fused_start
from dtorch_samedevice_group.fused_start import Kernel, prepared, quicker

NUMBERS = [2**40 + 1, -7, 0]


class Driver:
    """In libcuda's place: a function with parameters of these bytes each."""

    def __init__(self, *widths, error=0):
        self.widths, self.error, self.launches = widths, error, []

    def cuFuncGetParamInfo(self, function, number, offset, length):
        if number.value >= len(self.widths):
            return 1

        offset._obj.value, length._obj.value = sum(self.widths[: number.value]), self.widths[number.value]
        return 0

    def cuLaunchKernel(self, function, x, y, z, width, height, depth, shared, stream, places, extra):
        values = [c_int64.from_address(place).value for place in places]
        shape = [number.value for number in (x, y, z, width, height, depth, shared)]
        self.launches.append((function.value, shape, stream.value, values, extra))
        return self.error


@pytest.fixture
def use(monkeypatch):
    """Use this driver."""

    def use(driver):
        monkeypatch.setattr(fused_start, "_driver", lambda: driver)
        return driver

    return use


class Compiled:
    """In triton's place."""

    function = 2**45 + 3

    def __init__(self, **about):
        usual = {"global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1, "shared": 16, "num_warps": 8}
        usual |= {"launch_cooperative_grid": False, "launch_pdl": False}
        self.metadata, self.started = SimpleNamespace(**usual | about), []

    def __getitem__(self, grid):
        return lambda *args, stream: self.started.append((grid, args, stream))


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_arguments_are_laid_out_once_and_launched_often(use, hidden):
    driver, compiled = use(Driver(*[8] * (3 + hidden))), Compiled()
    start = prepared(Kernel(compiled, 3), ("constant",), (5, 6, 1), NUMBERS)
    start(stream=2**46)
    start(stream=0)
    shape, values = [5, 6, 1, 256, 1, 1, 16], [*NUMBERS, *[0] * hidden]
    assert driver.launches == [(2**45 + 3, shape, place, values, None) for place in (2**46, None)]
    assert not compiled.started


def test_what_the_driver_refuses_is_left_to_triton(use):
    """It makes a context where the thread has none, and else says what is wrong."""
    use(Driver(8, 8, 8, error=201))
    compiled = Compiled()
    prepared(Kernel(compiled, 3), ("constant",), (5, 6, 1), NUMBERS)(stream=4)
    assert compiled.started == [((5, 6, 1), (*NUMBERS, "constant"), 4)]


@pytest.mark.parametrize("widths", [(), (8, 8), (8, 4, 8), (8, 8, 8, 8, 8, 8)])
def test_other_parameters_are_left_to_triton(use, widths):
    use(Driver(*widths))
    compiled = Compiled()
    assert quicker(compiled, 3) is compiled


@pytest.mark.parametrize(
    "about",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"num_ctas": 2},
        {"shared": 2**16},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
    ],
    ids=lambda about: next(iter(about)),
)
def test_a_kernel_that_needs_more_is_left_to_triton(use, about):
    use(Driver(8, 8, 8))
    assert isinstance(quicker(Compiled(), 3), Kernel)
    compiled = Compiled(**about)
    assert quicker(compiled, 3) is compiled


def test_unknown_tritons_and_drivers_are_left_to_triton(use, monkeypatch):
    use(Driver(8, 8, 8))
    odd = SimpleNamespace(metadata=SimpleNamespace())
    assert quicker(odd, 3) is odd
    compiled = Compiled()
    use(object())
    assert quicker(compiled, 3) is compiled, "a driver of before CUDA 12.4"
    monkeypatch.undo()
    monkeypatch.setattr(fused_start, "LIBRARY", "libcuda.missing.so")
    fused_start._driver.cache_clear()
    assert quicker(compiled, 3) is compiled
