"""What the other one of two processes on a GPU does, and this one's side of it.

    python file_cuda_roles.py ROLE FD
"""

import json
import os
import socket
import sys
import threading
import time

import torch
from dtorch_file_store.cuda.copies import Copies
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import driver
from dtorch_file_store.cuda.exports import Exports
from dtorch_file_store.cuda.imports import Imports
from dtorch_file_store.cuda.janitor import JANITOR
from dtorch_file_store.cuda.signals import Mark, OwnSignals, PeerSignals
from dtorch_file_store.cuda.ticket import Ticket
from dtorch_file_store.tensors import _DTYPES

from dtorch_core.errors import UnsupportedTensorError

LIMIT = 20.0


class Side:
    """One process's end of all of it, and a connection to the other one."""

    def __init__(self, connection):
        connection.settimeout(60)
        self.connection = connection
        self.lost = False
        self.calls = driver()
        self.devices = Devices(self.calls)
        self.exports = Exports(self.calls, self.devices)
        self.imports = Imports(self.calls, self.devices)
        self.own = OwnSignals(self.calls)
        socket.send_fds(connection, [b"page"], [self.own.fd])
        _, fds, _, _ = socket.recv_fds(connection, 16, 1)
        self.peer = PeerSignals(self.calls, fds[0])

    def say(self, *values):
        self.connection.sendall(json.dumps(values).encode())

    def hear(self):
        return json.loads(self.connection.recv(1 << 16))

    def offer(self, tensor, stream):
        """Say where a tensor is, and when it will be ready."""
        self.say(self.exports.ticket(tensor).to_json(), self.own.write(stream))

    def take(self, stream):
        ticket, mark = self.hear()
        tensor = self.imports.tensor(1, Ticket.from_json(ticket))
        self.peer.wait(Mark.from_json(mark), stream)
        return tensor

    def close(self):
        self.own.close()
        self.peer.close()
        self.imports.close()


def sleep(seconds):
    torch.cuda._sleep(int(seconds * 1.8e9))


def warm_up():
    """A kernel's first launch waits for the device, also for streams that wait."""
    tensor = torch.arange(8, device="cuda")
    (tensor.clone() + 1).mul_(2).copy_(tensor)
    tensor.to(torch.float32).fill_(1)
    sleep(0)
    torch.cuda.synchronize()


def samples():
    """A tensor of each dtype and layout, by name."""
    for name, dtype in _DTYPES.items():
        raw = (torch.arange(256) % 251).to(torch.uint8)
        yield name, (raw % 2 if dtype is torch.bool else raw).cuda().view(dtype)

    values = torch.complex(torch.arange(24.0), torch.arange(24.0) + 1).cuda().reshape(2, 3, 4)
    yield "conjugate", values.conj()
    yield "negative", values.conj().imag
    yield "permuted", values.permute(2, 0, 1)[1:]
    yield "expanded", torch.arange(5, device="cuda").expand(3, 5)
    yield "scalar", torch.tensor(7.5, device="cuda")
    yield "empty", torch.empty(0, 3, device="cuda", dtype=torch.bfloat16)
    yield "strided", torch.arange(1000, device="cuda")[100:900:7]


def role_exchange(side):
    for _ in range(side.hear()[0]):
        stream = torch.cuda.Stream()
        got = side.take(stream)
        with torch.cuda.stream(stream):
            mine = got + 1
            got.mul_(2)

        side.offer(mine, stream)
        side.hear()


def role_samples(side):
    kept = dict(samples())
    torch.cuda.synchronize()
    for name, tensor in kept.items():
        side.say(name, side.exports.ticket(tensor).to_json())

    return kept


def role_die(side):
    stream = torch.cuda.Stream()
    if side.hear() == ["producer"]:
        tensor = torch.arange(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            sleep(2)
            tensor.add_(1)

        side.offer(tensor, stream)
    else:
        tensor = side.take(stream)
        with torch.cuda.stream(stream):
            sleep(2)
            tensor.add_(1)

        side.say(side.own.write(stream))

    time.sleep(60)


def role_again(side):
    for step in range(2):
        tensor = torch.arange(1 << 23, device="cuda") + step
        torch.cuda.synchronize()
        side.say(side.exports.gone(), side.exports.ticket(tensor).to_json())
        side.hear()
        del tensor
        torch.cuda.empty_cache()

    side.say(side.exports.gone())


def role_leave(side):
    tensor = torch.arange(1 << 20, device="cuda")
    torch.cuda.synchronize()
    side.say(side.exports.ticket(tensor).to_json())
    side.hear()
    os._exit(0)


def role_expandable(side):
    stream, copies = torch.cuda.Stream(), Copies(side.calls, 0)
    for step in range(4):
        with torch.cuda.stream(stream):
            tensor = torch.arange(1 << 20, device="cuda")[::2]
            sleep(0.05)
            tensor.add_(step)

        try:
            side.exports.ticket(tensor)
            side.say("shared")
        except UnsupportedTensorError as error:
            side.say(str(error))

        copy = copies.copy(tensor, stream)
        side.offer(copy, stream)
        (mark,) = side.hear()
        side.peer.wait(Mark.from_json(mark), stream)
        copies.give_back(copy, stream)
        if step == 1:
            torch.cuda.synchronize()

    side.say(len(copies._chunks), len(copies._out))
    side.hear()
    copies.close()
    side.close()
    side.say(JANITOR.settle(LIMIT), JANITOR.held)


def role_thread(side):
    """A thread that never used CUDA has no context."""
    tensor, stream = torch.arange(100, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()

    def body():
        assert side.calls.context() == 0
        side.offer(tensor, stream)
        side.say(side.own.write(torch.cuda.default_stream()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return tensor


if __name__ == "__main__":
    ending = Side(socket.socket(fileno=int(sys.argv[2])))
    warm_up()
    kept = globals()[f"role_{sys.argv[1]}"](ending)
    ending.connection.recv(64)  # the other process is through with our memory, or is dead
    os._exit(0)
