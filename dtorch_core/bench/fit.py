"""A line through what was measured: what a call costs whatever it moves, and how fast it moves the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Line(NamedTuple):
    """``seconds = fixed + bytes / bandwidth``."""

    fixed: float
    """Seconds."""
    bandwidth: float
    """Bytes a second; infinite where the time does not grow with the bytes."""

    def seconds(self, nbytes: int) -> float:
        """What the line says of one size."""
        return self.fixed + nbytes / self.bandwidth


def fit(times: Mapping[int, float]) -> Line:
    """The line with the least squares of the relative errors, over all measured sizes.

    It minimises ``sum(((a + b * bytes - seconds) / seconds) ** 2)`` over ``a >= 0`` and ``b >= 0``; the line is
    ``a + bytes / (1 / b)``. The errors are relative, so that a small size counts as much as a large one.

    :param times: the seconds of each size in bytes.
    :raises ValueError: if there are fewer than two sizes.
    """
    if len(times) < 2:
        raise ValueError(f"a line needs two sizes, not {len(times)}")

    points = [(nbytes, 1 / seconds**2, seconds) for nbytes, seconds in times.items()]
    w = math.fsum(weight for _, weight, _ in points)
    x = math.fsum(weight * nbytes for nbytes, weight, _ in points)
    xx = math.fsum(weight * nbytes * nbytes for nbytes, weight, _ in points)
    y = math.fsum(weight * seconds for _, weight, seconds in points)
    xy = math.fsum(weight * nbytes * seconds for nbytes, weight, seconds in points)
    fixed, slope = (y * xx - x * xy) / (w * xx - x * x), (w * xy - x * y) / (w * xx - x * x)
    if slope <= 0:
        return Line(y / w, math.inf)

    if fixed < 0:
        return Line(0.0, xx / xy)

    return Line(fixed, 1 / slope)
