"""The names this project knows without importing anything: what to install for each, and what is reserved.

Only names, distributions and variables are here. What a backend can do is said by its plugin.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from dtorch_core._selection.reasons import Kind, Verdict
from dtorch_core._text import canonical

DISTRIBUTIONS: dict[Kind, dict[str, str]] = {
    "store": {"memory": "dtorch-memory-store", "file": "dtorch-file-store"},
    "group": {"samedevice": "dtorch-samedevice-group", "nccl": "dtorch-nccl-group"},
    "promise": {"memory": "dtorch-memory-store", "file": "dtorch-file-store"},
}
"""First-party backends and the distribution that brings each."""

RESERVED: dict[Kind, dict[str, str]] = {
    "store": {"network": "several hosts"},
    "group": {"mixed": "ranks of which only some share a device, and several hosts"},
    "promise": {"network": "several hosts"},
}
"""Names kept for backends that no distribution offers yet, and what each will be for."""


class Switch(NamedTuple):
    """A variable that is ``0`` or ``1``: what is so then."""

    off: str
    on: str
    unset: Literal["on", "off"] = "on"


SWITCHES = {
    "DTORCH_FILE_IPC": Switch(
        "CUDA tensors go through host memory between processes of dtorch-file-store",
        "CUDA tensors stay on the GPU between processes of dtorch-file-store",
    ),
    "DTORCH_FUSED": Switch(
        "collectives of dtorch-samedevice-group on CUDA use torch's kernels",
        "collectives of dtorch-samedevice-group on CUDA use fused kernels",
    ),
    "DTORCH_LOOK": Switch(
        "waiting threads of dtorch-memory-store sleep at once",
        "waiting threads of dtorch-memory-store look for a moment before they sleep",
    ),
}
"""The environment variables of first-party plugins that are on unless they are ``0``."""

VARIABLES = {
    "DTORCH_FILE_ARENA_BYTES": "how many bytes of shared memory dtorch-file-store may hold in one process",
    "DTORCH_SESSION_DIR": "where dtorch-file-store keeps the sessions of this user",
    **{name: f"0: {switch.off}" for name, switch in SWITCHES.items()},
}
"""The environment variables that first-party plugins read, and what each is for."""


def absent(kind: Kind, present: set[str]) -> list[Verdict]:
    """A verdict for each known name that no installed plugin offers."""
    missing = [
        Verdict(name, distribution, "", "absent", 0, f"not installed; pip install {distribution}")
        for name, distribution in DISTRIBUTIONS[kind].items()
        if name not in present
    ]
    reserved = [
        Verdict(name, "", "", "absent", 0, f"reserved for {purpose}; no distribution offers it yet")
        for name, purpose in RESERVED[kind].items()
        if name not in present
    ]
    return missing + reserved


def install_hint(kind: Kind) -> str:
    """What to do where no backend of a kind is installed."""
    return f"No {kind} backend is installed: pip install {' '.join(dict.fromkeys(DISTRIBUTIONS[kind].values()))}"


def names_of(distribution: str, kind: Kind) -> tuple[str, ...] | None:
    """The backends of one kind that a first-party distribution brings; None for a distribution of somebody else."""
    ours = {known for names in DISTRIBUTIONS.values() for known in names.values()}
    if canonical(distribution) not in ours:
        return None

    return tuple(name for name, known in DISTRIBUTIONS[kind].items() if known == canonical(distribution))
