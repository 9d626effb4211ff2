"""A driver that needs no GPU, for the tests of how processes share CUDA memory."""

import contextlib
import ctypes

import pytest
from dtorch_file_store.cuda import driver as driver_module
from dtorch_file_store.cuda.driver import NO_ALLOCATION, Driver, DriverError
from dtorch_file_store.cuda.ticket import Ticket
from dtorch_file_store.tensors import Layout

LIMIT = 20.0
HERE, THERE = "ab" * 16, "cd" * 16


class OurDriver(Driver):
    """Does what it is asked at once, in this process's memory."""

    def __init__(self, uuids=(HERE,)):
        self.uuids = uuids
        self.attributes = {driver_module.HOST_REGISTER_SUPPORTED: 1, driver_module.IPC_EVENT_SUPPORTED: 1}
        self.allocations = {}
        self.asked = []
        self.opened = {}
        self.registered = set()
        self.waits = []
        self.captured = set()
        self.refuses = None

    def on(self, ordinal):
        return contextlib.nullcontext()

    def device_count(self):
        return len(self.uuids)

    def uuid(self, ordinal):
        return self.uuids[ordinal]

    def attribute(self, ordinal, number):
        return self.attributes.get(number, 0)

    def allocation(self, address):
        for found in self.allocations.values():
            if found.base <= address < found.base + found.size:
                return found

        return NO_ALLOCATION

    def buffer(self, address):
        return self.allocation(address).buffer

    def ipc_handle(self, base):
        self._refuse()
        self.asked.append(base)
        return base.to_bytes(64, "little")

    def ipc_open(self, handle):
        self._refuse()
        address = int.from_bytes(handle, "little")
        self.opened[address] = self.opened.get(address, 0) + 1
        return address

    def ipc_close(self, address):
        self.opened[address] -= 1

    def host_register(self, address, nbytes):
        self.registered.add(address)
        return address

    def host_unregister(self, address):
        self.registered.remove(address)

    def capturing(self, stream):
        return stream.cuda_stream in self.captured

    def stream_write(self, ordinal, stream, address, value):
        self._refuse()
        ctypes.c_uint32.from_address(address).value = value

    def stream_wait(self, ordinal, stream, address, value):
        self.waits.append((stream, address, value))

    def synchronize(self):
        pass

    def _refuse(self):
        if self.refuses:
            raise DriverError(f"CUDA's call failed with {self.refuses}", self.refuses)


@pytest.fixture
def calls():
    return OurDriver()


def ticket_of(tensor, allocation=1, owner="another", device=HERE):
    layout = Layout.of_view(tensor)
    handle = tensor.data_ptr().to_bytes(64, "little").hex()
    return Ticket(owner, device, allocation, handle, 0, layout, tensor.is_conj(), tensor.is_neg())
