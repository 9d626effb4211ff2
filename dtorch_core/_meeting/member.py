"""Describes this rank: host, process, thread, device."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from dtorch_core._selection.registry import registry
from dtorch_core._selection.topology import Member

if TYPE_CHECKING:
    import torch


def normal_device(device: str | torch.device | None) -> str:
    """A device as this project writes it: ``"cpu"`` (also for None), ``"cuda:0"`` with its index.

    :raises ValueError: if torch does not know the device, or it is not on this machine.
    """
    import torch

    if device is None:
        return "cpu"

    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r}: a rank's is 'cpu' or 'cuda:N' ({str(error).splitlines()[0]})") from None

    if parsed.type == "cpu":
        return "cpu"

    if parsed.type != "cuda":
        raise ValueError(f"device {device!r}: a rank's is 'cpu' or 'cuda:N'")

    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: this torch ({torch.__version__}) sees no CUDA device")

    index = parsed.index
    if index is None:
        # Asking torch would begin CUDA here, and the device may be for ranks in other processes.
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0

    if index >= torch.cuda.device_count():
        raise ValueError(f"device {device!r}: there are only {torch.cuda.device_count()} CUDA devices here")

    return f"cuda:{index}"


def describe(rank: int, device: str) -> Member:
    """This thread as rank ``rank`` on ``device``, with the facts that the plugins add."""
    known = registry()
    member = Member(rank, host(), os.getpid(), threading.get_ident(), device, _uuid(device))
    facts: dict[str, str] = {}
    for plugin, found in known.call("dtorch_describe_member", {"member": member}, _checked_facts):
        for taken in sorted(found.keys() & facts.keys()):
            known.report(f"dtorch_describe_member of {plugin.label}: the fact {taken!r} is another plugin's; ignored")

        facts = {**found, **facts}

    return replace(member, facts=facts) if facts else member


@cache
def host() -> str:
    """The boot id plus the namespaces that containers separate: equal for processes that can reach each other."""
    parts = [_read("/proc/sys/kernel/random/boot_id")]
    parts += [_link(f"/proc/self/ns/{namespace}") for namespace in ("pid", "mnt")]
    return "/".join(parts)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        # Not Linux: the node's hardware address is the next best thing that two processes agree on.
        import uuid

        return f"{uuid.getnode():x}"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "-"


@cache
def _uuid(device: str) -> str:
    if not device.startswith("cuda"):
        return ""

    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _checked_facts(facts: object) -> dict[str, str]:
    if not isinstance(facts, Mapping) or not all(isinstance(x, str) for pair in facts.items() for x in pair):
        raise TypeError(f"must return a mapping of strings to strings, not {facts!r}")

    return dict(facts)
