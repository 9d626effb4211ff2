"""How large what is measured is: sizes as a person writes them, and what the memory that is free allows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

SIZES = (KIB, 32 * KIB, MIB, 8 * MIB, 64 * MIB, 256 * MIB, GIB)
"""What is measured where no sizes are asked for, up to the largest that is."""
QUICK = (KIB, MIB, 64 * MIB)
LARGEST = {"cpu": 64 * MIB, "cuda": 256 * MIB}
"""Where nobody says how large: larger ones take minutes."""

_UNITS = {"": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_SPARE = 0.8
"""The part of the free memory that is used at most."""


def size(nbytes: int) -> str:
    """``64 MiB``."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"

    return f"{nbytes} B"


def parse(text: str) -> int:
    """Bytes, of ``64MiB``, ``1 KiB`` or ``4096``.

    :raises ValueError: if it is none of these, or no multiple of 1 KiB: every rank's share is to be whole.
    """
    found = re.fullmatch(r"\s*(\d+)\s*([kmgt]ib|)\s*", text.lower(), re.ASCII)
    if not found:
        raise ValueError(f"a size is a whole number of KiB, MiB, GiB or TiB, or of bytes (as in 64MiB), not {text!r}")

    nbytes = int(found[1]) * _UNITS[found[2]]
    if nbytes < KIB or nbytes % KIB:
        raise ValueError(f"a size is a multiple of 1 KiB: every rank has a whole share of it; {text!r} is not")

    return nbytes


def room(device: str) -> int:
    """Bytes that a measurement may take on a device."""
    if device == "cpu":
        return int(_SPARE * min(_free()))

    return int(_SPARE * torch.cuda.mem_get_info(torch.device(device))[0])


def _free() -> Iterator[int]:
    """What the machine has, and what the control group allows."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * KIB

    group = Path("/sys/fs/cgroup")
    most, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if most and used and most[0] != "max":
        yield max(0, int(most[0]) - int(used[0]))

    yield 2**63  # where the system says nothing


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
