"""The samedevice group: the contract of every group, and what is this one's own."""

from dtorch_core.testing import ThreadGroupTests


class TestSameDeviceGroupConforms(ThreadGroupTests):
    backend = "samedevice"
