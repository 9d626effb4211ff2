"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def usable(groups: Path = CONTROL_GROUPS) -> int:
    """Those that it may run on, or as many as its container may use at a time, if that is less; at least one."""
    # Its main thread's: this one may be a rank that is bound to a core of its own.
    cores = len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota / period) for quota, period in _limits(groups))]))


def _limits(groups: Path) -> list[tuple[float, float]]:
    """What control groups of the kernel allow, of both versions, as a container sees them: so long of every so long."""
    limits = []
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((groups / file).read_text() for file in files).split()
            if float(quota) > 0:
                limits.append((float(quota), float(period)))
        except (OSError, ValueError):  # there is none, or its quota is "max"
            continue

    return limits
