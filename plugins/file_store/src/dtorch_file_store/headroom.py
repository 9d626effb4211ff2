"""How much shared memory this process may still take.

Memory without a name has no limit of its own: whoever takes too much of it meets the kernel's OOM killer, which ends
some process without a word. So we look first, and refuse in words.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from dtorch_core._text import size_text
from dtorch_core.errors import DtorchError

VARIABLE = "DTORCH_FILE_ARENA_BYTES"
"""Limits what all arenas of this process hold together, in bytes."""

MARGIN = 64 << 20
"""Bytes of the machine's memory that we leave to others."""

_CGROUPS = Path("/sys/fs/cgroup")


class Budget:
    """What this process's arenas hold together."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes."""
        return self._held

    def take(self, nbytes: int) -> str | None:
        """Count ``nbytes`` as held; or say why they may not be."""
        limit = limit_of_arenas()
        with self._mutex:  # and nothing in there that could call the garbage collector: see give()
            held = self._held
            if limit is None or held + nbytes <= limit:
                self._held = held + nbytes
                return None

        return f"this process holds {size_text(held)} of the {size_text(limit)} that {VARIABLE} allows"

    def give(self, nbytes: int) -> None:
        """They are held no longer. Called by the garbage collector, too."""
        with self._mutex:
            self._held -= nbytes


BUDGET = Budget()
"""The one of this process."""


def limit_of_arenas() -> int | None:
    """What the environment allows this process, in bytes; None where it says nothing.

    :raises DtorchError: if it is no whole number of bytes.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None

    if not text.isascii() or not text.isdigit():
        raise DtorchError(f"{VARIABLE} must be a whole number of bytes, not {text!r}")

    return int(text)


def why_not(nbytes: int) -> str | None:
    """Why the machine, or this process's control group, has no room for ``nbytes`` more; None if it has."""
    for free, where in _room():
        if free < nbytes + MARGIN:
            return f"{where} has {size_text(max(0, free))} left, of which {size_text(MARGIN)} stay free for others"

    return None


def _room() -> Iterator[tuple[int, str]]:
    """Bytes that are left, and of what."""
    facts = _pairs(Path("/proc/meminfo"))
    if "MemAvailable:" in facts:
        yield facts["MemAvailable:"] * 1024, "this machine"

    yield from _room_of_groups()


def _room_of_groups() -> Iterator[tuple[int, str]]:
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _room_above(_CGROUPS, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _room_above(_CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _room_above(root: Path, path: str, limit_name: str, used_name: str) -> Iterator[tuple[int, str]]:
    """Of a group and of those around it. In a container its own group is often mounted as the root."""
    inner = root / path.lstrip("/")
    for folder in [inner, *inner.parents][: len(inner.parts) - len(root.parts) + 1]:
        limit, used = _text(folder / limit_name), _text(folder / used_name)
        if limit.isdigit() and used.isdigit():
            cache = _pairs(folder / "memory.stat").get("inactive_file", 0)  # goes when memory is short
            yield int(limit) - int(used) + cache, f"the control group {folder}"


def _pairs(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
