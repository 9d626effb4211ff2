"""Devices of several processes: matched by UUID, since ordinals depend on CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from dtorch_file_store.cuda.driver import (
    COMPUTE_MODE,
    EXCLUSIVE_MODES,
    HOST_REGISTER_SUPPORTED,
    INTEGRATED,
    IPC_EVENT_SUPPORTED,
    Driver,
    DriverError,
    driver,
)


class Devices:
    """The devices that this process sees. Cheap to ask: no context comes to be."""

    def __init__(self, calls: Driver) -> None:
        """
        :raises DriverError: if CUDA can't be used here.
        """
        self._driver = calls
        self.uuids = [calls.uuid(ordinal) for ordinal in range(calls.device_count())]
        """By ordinal. The names that processes tell each other."""
        self._ordinals = {uuid: ordinal for ordinal, uuid in enumerate(self.uuids)}

    def ordinal(self, uuid: str) -> int | None:
        """What this process calls a device; None where it does not see it."""
        return self._ordinals.get(uuid)

    def reaches(self, uuid: str) -> str | None:
        """Why memory of another process on that device can't be mapped here; None where nothing speaks against it.

        The last word is the first import's: containers can forbid what the devices allow.
        """
        ordinal = self.ordinal(uuid)
        if ordinal is None:
            return f"this process does not see the device {uuid} (it sees {len(self.uuids)}): CUDA_VISIBLE_DEVICES"

        mode = EXCLUSIVE_MODES.get(self._driver.attribute(ordinal, COMPUTE_MODE))
        if mode is not None:
            return f"cuda:{ordinal} is {mode} (its compute mode), so processes can't share it"

        if self._driver.attribute(ordinal, INTEGRATED):
            return f"cuda:{ordinal} is integrated: its memory has no interprocess handles"

        if not self._driver.attribute(ordinal, IPC_EVENT_SUPPORTED):
            return f"cuda:{ordinal} has no interprocess handles on this system"

        if not self._driver.attribute(ordinal, HOST_REGISTER_SUPPORTED):
            return f"cuda:{ordinal} can't use pages of the host, by which processes signal each other"

        return None


def reaches(uuid: str) -> str | None:
    """As :meth:`Devices.reaches`, also where CUDA can't be used at all."""
    try:
        return Devices(driver()).reaches(uuid)
    except DriverError as error:
        return str(error)
