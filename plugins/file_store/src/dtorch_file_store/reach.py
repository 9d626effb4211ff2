"""Which CUDA memory a process can map; what ranks tell each other about it when they meet. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable

from dtorch_core import Member
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import DriverError, driver

REASON = "file.ipc"
"""A member's fact: why CUDA memory of others can't be mapped in its process; empty where it can."""

SEEN = "file.devices"
"""A member's fact: the UUIDs of the devices that its process sees."""

HOME = "file.device"
"""A member's fact: the UUID of its own device."""

VARIABLE = "DTORCH_FILE_IPC"
"""The environment variable that forbids it, where it is ``0``: for systems on which it turns out not to work."""


def facts(device: str) -> dict[str, str]:
    """The facts of a rank on ``device``, which is ``"cuda:N"``."""
    if os.environ.get(VARIABLE, "").strip() == "0":
        return {REASON: f"{VARIABLE}=0 forbids it", SEEN: "", HOME: ""}

    try:
        devices = Devices(driver())
        home = devices.uuids[int(device.partition(":")[2])]
        reason = devices.reaches(home)
    except DriverError as error:
        return {REASON: str(error), SEEN: "", HOME: ""}

    return {REASON: reason or "", SEEN: ",".join(devices.uuids), HOME: home}


def why_host(members: Iterable[Member], devices: Iterable[str]) -> str | None:
    """Why not every member can map the memory of these devices; None if all can."""
    wanted = sorted(set(devices))
    for member in members:
        reason = member.facts.get(REASON, "it is not on a CUDA device")
        unseen = [uuid for uuid in wanted if uuid not in member.facts.get(SEEN, "").split(",")]
        if not reason and unseen:
            reason = f"it does not see the device {unseen[0]} (CUDA_VISIBLE_DEVICES)"

        if reason:
            return f"rank {member.rank}: {reason}"

    return None
