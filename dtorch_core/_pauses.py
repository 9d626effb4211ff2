"""When a thread that looks before it sleeps should sleep at once for a while: for stores.

Between two looks a thread offers its core. Where another program is always busy, that has the core then, for
milliseconds, and nobody wakes a thread that only looks: whoever sleeps is back sooner. But a core that is gone once in
a while, as a virtual machine's may be, is no reason to give up looking.

(Measured on two cores, looks of threads between two such losses: with a busy program on each core 0 or 1, 4 at most in
99 of 100 cases; without one, on a shared machine, more than 80 in 9 of 10.)
"""

from __future__ import annotations

CROWD = 200e-6
"""Seconds: a thread that has its core back no sooner, after it offered it, has met a program that took it."""

FIRST, MOST = 0.002, 0.1
"""Seconds of a pause: of the first one, and at most. Each doubles the next one."""

ENOUGH = 16
"""After as many looks the next pause is a first one again."""


class Pauses:
    """Those of one thread, or of the threads that take turns at looking."""

    __slots__ = ("_pause", "looks", "until")

    def __init__(self) -> None:
        self.until = 0.0
        """When one may look again, by the monotonic clock."""
        self.looks = 0
        """Begun since the last pause. Whoever looks counts it."""
        self._pause = FIRST / 2

    def begin(self, now: float) -> None:
        """The look that was begun last has met a program that took the core."""
        self._pause = FIRST if self.looks > ENOUGH else min(2 * self._pause, MOST)
        self.looks = 0
        self.until = now + self._pause
