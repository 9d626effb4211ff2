"""How long threads do not look after another program has taken their core."""

import pytest

from dtorch_core._pauses import ENOUGH, FIRST, MOST, Pauses


def pauses_after(looks, own=None):
    """The seconds of each pause, where a program takes the core after each of so many looks."""
    own, lengths, now = own or Pauses(), [], 100.0
    for count in looks:
        assert own.until <= now
        own.looks += count
        own.begin(now)
        lengths.append(own.until - now)
        now = own.until

    return lengths


def test_they_double_while_each_of_a_few_looks_meets_the_program():
    assert pauses_after([1, 1, 4, ENOUGH, 1]) == pytest.approx([FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, 16 * FIRST])


def test_they_are_bounded():
    assert pauses_after([1] * 50)[-1] == pytest.approx(MOST)


def test_a_core_that_is_gone_once_in_a_while_costs_a_first_one():
    assert pauses_after([1, 1, 1, ENOUGH + 1, 1]) == pytest.approx([FIRST, 2 * FIRST, 4 * FIRST, FIRST, 2 * FIRST])
