"""Which CUDA memory a process can map; what ranks tell each other about it when they meet. Imports no torch."""

from __future__ import annotations

from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import DriverError, driver

REASON = "file.ipc"
"""A member's fact: why CUDA memory of others can't be mapped in its process; empty where it can."""

SEEN = "file.devices"
"""A member's fact: the UUIDs of the devices that its process sees."""


def facts(device: str) -> dict[str, str]:
    """The facts of a rank on ``device``, which is ``"cuda:N"``."""
    try:
        devices = Devices(driver())
        reason = devices.reaches(devices.uuids[int(device.partition(":")[2])])
    except DriverError as error:
        return {REASON: str(error), SEEN: ""}

    return {REASON: reason or "", SEEN: ",".join(devices.uuids)}
