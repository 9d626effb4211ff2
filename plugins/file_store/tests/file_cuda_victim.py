"""Processes of ranks on a GPU that do what a test tells them, and can be killed at any step of it.

One process imports torch, and forks a rank's process whenever it is sent a connection; each begins CUDA for itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback

import torch

from dtorch_core import open_group, open_store

GPU = "cuda:0"
NUMEL = 1 << 20
LONG = 4_000_000_000
"""Clock cycles: about 2 s."""


def values(tag):
    return torch.arange(NUMEL, device=GPU) + 1_000_000 * tag


class Rank:
    """Each method is a command; what it returns or raises is the answer."""

    def __init__(self):
        self.store = self.group = self.got = self.copy = self.before = None
        torch.cuda.set_device(0)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        x = values(0)
        x.clone().fill_(-1).add_(x).copy_(x)
        torch.ones(NUMEL, device=GPU).clone().add_(torch.ones(NUMEL, device=GPU)).copy_(torch.zeros(NUMEL, device=GPU))
        torch.equal(x, x)
        torch.cat([x, x])
        torch.cuda._sleep(1)
        del x
        torch.cuda.synchronize()

    def open(self, rank, world_size, rendezvous, kind, name):
        given = {"rank": rank, "world_size": world_size, "rendezvous": rendezvous, "timeout": 20.0, "device": GPU}
        if kind == "group":
            self.group = open_group(name, backend="samedevice", **given)
            self.group.all_reduce(torch.ones(NUMEL, device=GPU))
        else:
            self.store = open_store(name, backend="file", **given)

        torch.cuda.synchronize()
        gc.collect()
        self.before = torch.cuda.memory_allocated()

    def close(self):
        for handle in (self.store, self.group):
            if handle is not None:
                handle.close()

        self.store = self.group = None

    def sleep(self):
        """Kernels that run for long, before whatever comes."""
        torch.cuda._sleep(LONG)

    def set(self, key):
        tensor = torch.zeros(NUMEL, dtype=torch.int64, device=GPU)
        tensor.copy_(values(len(key)))
        self.store.src_set(key, tensor, 1)

    def wait(self, key):
        self.store.src_wait_until_get_finished(key)
        values(0).fill_(-1)  # behind the consumer's kernels

    def get(self, key):
        self.got = self.store.dest_get(key)
        self.copy = self.got.clone()

    def check(self, key):
        assert torch.equal(self.copy, values(len(key)))

    def finish(self, key):
        self.store.dest_finish_get(key)

    def barrier(self):
        self.store.barrier()

    def reduce(self):
        """One collective; nobody's host waits for the device."""
        self.group.all_reduce(torch.ones(NUMEL, device=GPU))

    def collectives(self):
        """Again and again, until it raises."""
        x, parts = torch.ones(NUMEL, device=GPU), list(torch.ones(2, 8, device=GPU))
        while True:
            self.group.all_reduce(x)
            self.group.all_gather(x)
            self.group.reduce_scatter(x)
            self.group.broadcast(x, 0)
            self.group.all_to_all(x.reshape(2, -1), 0, 1)
            self.group.gather(x, 0)
            self.group.scatter(parts if self.group.rank == 0 else None, 0)
            self.group.send(x, 1 - self.group.rank)
            self.group.recv(1 - self.group.rank)

    def free(self):
        """The seconds until all that this process has queued is done; then memory comes and goes."""
        begun = time.monotonic()
        torch.cuda.synchronize()
        took = time.monotonic() - begun
        torch.zeros(1 << 28, dtype=torch.uint8, device=GPU)
        self.got = self.copy = None
        gc.collect()
        torch.cuda.empty_cache()
        return took

    def held(self):
        """Bytes of this process's tensors beyond those of its begin, and the bytes of the GPU that are free."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() - self.before, torch.cuda.mem_get_info()[0]


def obey(line):
    """Do what comes by the line, one command after the other."""
    rank = Rank()
    with line, line.makefile("r") as commands:
        tell(line, pid=os.getpid())
        for command in commands:
            name, *given = json.loads(command)
            try:
                value = getattr(rank, name)(*given)
            except Exception as error:
                tell(line, error=type(error).__name__, text=str(error), trace=traceback.format_exc())
            else:
                tell(line, value=value)


def tell(line, **what):
    line.sendall(json.dumps({**what, "at": time.monotonic()}).encode() + b"\n")


def serve(place):
    """Fork a process for each connection that is sent, until there is nobody to send one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    place.sendall(b"!")
    while True:
        _, fds, _, _ = socket.recv_fds(place, 1, 1)
        if not fds:
            return

        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            place.close()
            obey(socket.socket(fileno=fds[0]))
            sys.exit()

        os.close(fds[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for plugin in ("dtorch_file_store.store", "dtorch_samedevice_group.group"):
        importlib.import_module(plugin)

    serve(socket.socket(fileno=int(sys.argv[1])))
