"""What is launched again, and what is decided anew."""

import pytest
import torch
from dtorch_samedevice_group import fused_again
from dtorch_samedevice_group.fused_again import Again


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

        assert again.left(tensors, tensors[:1], attempt) == (left if len(decided) else ())
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
