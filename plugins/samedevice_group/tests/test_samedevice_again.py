"""What is launched again, and what is decided anew."""

from functools import partial

import pytest
import torch
from dtorch_samedevice_group import fused, fused_again, fused_launch
from dtorch_samedevice_group.fused_again import Again
from dtorch_samedevice_group.recipes import Recipe


class Launcher:
    """In the launcher's place."""

    def __init__(self):
        self.noted, self.repeated, self.usable = [], [], True

    def noting(self):
        launches = self.noted = []

        class Notes:
            def __enter__(self):
                return launches

            def __exit__(self, *error):
                pass

        return Notes()

    def repeat(self, launch):
        self.repeated.append(launch)
        return self.usable


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.setattr(fused_again, "launcher", Launcher())
    return fused_again.launcher


@pytest.fixture
def call(launcher):
    """A collective of all tensors; it returns how many decisions it has taken so far."""
    again, decided = Again(), []

    def call(*tensors, launches=1, left=()):
        def attempt():
            decided.append(tensors)
            launcher.noted.extend(("launch", len(decided), number) for number in range(launches))
            return left

        where = again.where(tensors)
        if not again.done(where, tensors[:1]):
            assert again.left(where, attempt) == left

        return len(decided)

    return call


def test_the_same_tensors_are_not_looked_at_twice(call, launcher):
    x, y = torch.ones(4), torch.ones(4)
    assert [call(x, y), call(x, y), call(x, y)] == [1, 1, 1]
    assert launcher.repeated == [("launch", 1, 0)] * 2
    assert (x._version, y._version) == (2, 0), "what is written has another version; the attempt sees to its own"


def test_other_places_lengths_and_orders_are_others(call):
    room = torch.ones(9)
    x, y = room[:4], room[4:8]
    assert call(x, y) == 1
    assert call(y, x) == 2
    assert call(room[:3], y) == 3
    assert call(x, room[5:9]) == 4
    assert call(room[:4], room[4:8]) == 4, "other tensors of the same memory"


@pytest.mark.parametrize(
    "odd", [lambda: torch.ones(8)[::2], lambda: torch._neg_view(torch.ones(4)), lambda: torch.ones(2).cfloat().conj()]
)
def test_what_is_not_simply_memory_is_decided_each_time(call, odd):
    x, y = torch.ones(4), odd()
    assert [call(x, y), call(x, y)] == [1, 2]


def test_only_one_kernel_that_does_it_all_is_remembered(call):
    x, y, z = torch.ones(4), torch.ones(4), torch.ones(4)
    assert [call(x, launches=0), call(x, launches=0)] == [1, 2]
    assert [call(y, launches=2), call(y, launches=2)] == [3, 4]
    assert [call(z, left=("job",)), call(z, left=("job",))] == [5, 6]


def test_a_launch_that_fails_is_decided_anew(call, launcher):
    x = torch.ones(4)
    assert call(x) == 1
    launcher.usable = False
    assert call(x) == 2


def test_memory_is_bounded(call, monkeypatch):
    monkeypatch.setattr(fused_again, "_MOST", 3)
    room = torch.ones(10)
    for number in range(9):
        call(room[number:])

    assert call(room[8:]) == 9
    assert call(room[0:]) == 10


class TestKernelsOfOneCall:
    """With the launcher itself, and kernels that triton has not made."""

    def test_one_is_compiled_and_the_other_one_is_known(self, monkeypatch):
        """The first call of several tensors launches one kernel as it is compiled, and then again as it is known."""
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # where CPU tensors say they are
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        launcher, reduced = fused_launch.Launcher(), []
        launcher.usable = True

        class Compiled:
            def __getitem__(self, grid):
                return lambda first, *others, stream=None: reduced.append(first)

        def first(key, grid, numbers):
            launcher._compiled[key] = Compiled(), ()
            reduced.append(numbers[0])

        monkeypatch.setattr(launcher, "_first", first)
        monkeypatch.setattr(fused, "launcher", launcher)
        monkeypatch.setattr(fused_again, "launcher", launcher)
        how, again = Recipe("add", False, torch.float32, torch.float32), Again()
        jobs = [[torch.ones(8), torch.ones(8)] for _ in range(2)]
        tensors = [tensor for job in jobs for tensor in job]
        for _ in range(3):
            reduced.clear()
            where = again.where(tensors)
            assert again.done(where, tensors) or again.left(where, partial(fused.reduce_in_place, how, jobs)) == []
            assert reduced == [job[0].data_ptr() for job in jobs]
