"""What can be seen of another process of this machine: whether it lives, and how it ended."""

from __future__ import annotations

_EXITING = 0x4  # PF_EXITING


def how_it_ended(pid: int) -> str:
    """How a process ended that has just closed its end, as far as it can be seen."""
    flags, code = _state_of(pid)
    if flags is None:
        return "ended without setting it"

    if not flags & _EXITING:
        return "closed its connection without setting it"

    number = code & 0x7F
    return f"was killed by signal {number}" if number else f"exited with status {code >> 8} without setting it"


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    flags, _ = _state_of(pid)
    return flags is not None and not flags & _EXITING


def _state_of(pid: int) -> tuple[int | None, int]:
    """The kernel's flags of a process, and the code with which it ends; it is there before the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None, 0

    return int(fields[6]), int(fields[49])
