"""How busy other programs kept our cores meanwhile: what is measured on a busy machine is worth less."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""The columns of a core's line that count idle time and waits for disks."""


class OthersLoad:
    """Counts from its creation on."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._begin = time.monotonic()
        self._busy, self._own = self._busy_seconds(), _own_seconds()

    def share(self) -> float | None:
        """The part of the cores' time that other programs took; None where the system does not say.

        Our own processes count as ours once they have ended.
        """
        if self._busy is None:
            return None

        busy = (self._busy_seconds() or 0.0) - self._busy
        return max(0.0, busy - (_own_seconds() - self._own)) / (time.monotonic() - self._begin) / len(self._cores)

    def _busy_seconds(self) -> float | None:
        if not _STAT.exists():
            return None

        ticks = 0
        for line in _STAT.read_text().splitlines():
            name, *columns = line.split()
            if name.removeprefix("cpu").isdigit() and int(name.removeprefix("cpu")) in self._cores:
                # user to steal; the columns after those are in user and nice already
                ticks += sum(int(column) for place, column in enumerate(columns[:8]) if place not in _IDLE)

        return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
