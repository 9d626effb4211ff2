"""Processes of ranks that do what a test tells them, and can be killed at any step of it.

To import torch takes seconds. So one process imports it once, and forks a rank's process whenever it is sent a
connection; it has no thread and no session, and each child has its own. They end when the connection does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from dtorch_core import open_group, open_store
from dtorch_core._selection.registry import registry

NUMEL = 1 << 16
"""Elements of the tensors that are exchanged: too many to ride in a message."""


def values(tag, numel=NUMEL):
    return torch.arange(numel, dtype=torch.int64) + 1_000_000 * tag


class Rank:
    """What a rank's process can be told. Each method is a command; what it returns or raises is the answer."""

    def __init__(self):
        self.store = self.group = self.got = self.line = None

    def open(self, rank, world_size, rendezvous, kind="store", name="kill", timeout=20.0):
        if isinstance(rendezvous, int):
            rendezvous = dist.TCPStore("127.0.0.1", rendezvous, None, False, wait_for_workers=False)

        given = {"rank": rank, "world_size": world_size, "rendezvous": rendezvous, "timeout": timeout}
        if kind == "group":
            self.group = open_group(name, backend="samedevice", **given)
        else:
            self.store = open_store(name, backend="file", **given)

    def split(self, members):
        self.group.split(members).close()

    def dies_opening(self, where, first, *opening):
        """Open it, and be killed at a place on the way: see :meth:`_dies_at`."""
        self._dies_at(where, first)
        self.open(*opening)

    def dies_splitting(self, where, first, members):
        self._dies_at(where, first)
        self.split(members)

    def _dies_at(self, where, first):
        """Be killed in a function, called with this ``first`` argument if one is said. Answers just before."""

        def die(*given, **named):
            if first and first not in given[:2]:
                return function(*given, **named)

            tell(self.line)
            os.kill(os.getpid(), signal.SIGKILL)

        module, _, name = where.partition(":")
        *path, name = name.split(".")
        place = importlib.import_module(module)
        for part in path:
            place = getattr(place, part)

        function = getattr(place, name)
        setattr(place, name, die)

    def close(self):
        begun = time.monotonic()
        for handle in (self.store, self.group):
            if handle is not None:
                handle.close()

        self.store = self.group = None
        return time.monotonic() - begun

    # The four steps

    def set(self, key, get_count, numel=NUMEL):
        self.store.src_set(key, values(len(key), numel), get_count)

    def wait(self, key, timeout=None):
        self.store.src_wait_until_get_finished(key, timeout=timeout)

    def get(self, key, timeout=None, numel=NUMEL):
        self.got = self.store.dest_get(key, timeout=timeout)
        assert torch.equal(self.got, values(len(key), numel))

    def look(self, key, numel=NUMEL):
        assert torch.equal(self.got, values(len(key), numel))

    def finish(self, key):
        self.store.dest_finish_get(key)

    def forget(self):
        """Let go of what was borrowed, and of what only a cycle of references keeps."""
        self.got = None
        gc.collect()

    def barrier(self, timeout=None):
        self.store.barrier(timeout=timeout)

    def reset(self, timeout=None):
        self.store.reset(timeout=timeout)

    # Groups

    def collective(self, name, numel=NUMEL, again=False):
        """Call it once, or again and again until it raises."""
        group, x = self.group, torch.ones(numel)
        next_rank, last_rank = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        parts = list(torch.ones(group.world_size, numel))
        calls = {
            "all_reduce": lambda: group.all_reduce(x),
            "reduce": lambda: group.reduce(x, 0),
            "broadcast": lambda: group.broadcast(x, 0),
            "all_gather": lambda: group.all_gather(x),
            "reduce_scatter": lambda: group.reduce_scatter(torch.cat(parts)),
            "all_to_all": lambda: group.all_to_all(torch.stack(parts), 0, 1),
            "gather": lambda: group.gather(x, 0),
            "scatter": lambda: group.scatter(parts if group.rank == 0 else None, 0),
            "barrier": lambda: group.barrier(),
            "recv": lambda: group.recv(1),
            "send and recv": lambda: (group.send(x, next_rank), group.recv(last_rank)),
        }
        calls[name]()
        while again:
            calls[name]()

    # How it ends

    def fail(self):
        """What a script does that raises: the interpreter ends."""
        sys.stderr = open(os.devnull, "w")
        raise SystemExit(1)

    def fail_in_thread(self, *opening):
        """A rank in a thread made by hand opens the store and fails; its process lives on."""

        def rank():
            self.open(*opening)
            raise KeyError("lost")

        threading.excepthook = lambda failed: None  # nothing on stderr
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join(opening[4] if len(opening) > 4 else 20.0)

    def set_many(self, count, numel):
        """The seconds that the slowest one took."""
        slowest = 0.0
        for number in range(count):
            begun = time.monotonic()
            self.store.src_set(f"many {number}", values(number, numel), 1)
            slowest = max(slowest, time.monotonic() - begun)

        return slowest

    def get_many(self, count, numel):
        for number in range(count):
            assert torch.equal(self.store.dest_get(f"many {number}"), values(number, numel))
            self.store.dest_finish_get(f"many {number}")

    def wait_many(self, count):
        for number in range(count):
            self.store.src_wait_until_get_finished(f"many {number}")

    def fork(self, seconds=10.0):
        """A child that tries the parent's store and then lives on: its pid, and what it says of each call."""
        here, there = socket.socketpair()
        child = os.fork()
        if child == 0:
            there.sendall(json.dumps(self._tries()).encode())
            there.shutdown(socket.SHUT_WR)
            time.sleep(seconds)
            os._exit(0)

        there.close()
        with here:
            here.settimeout(seconds)
            said = b""
            while data := here.recv(4096):
                said += data

        return child, json.loads(said)

    def _tries(self):
        store, answers = self.store, {}
        calls = {
            "src_set": lambda: store.src_set("forked", values(1), 1),
            "src_wait_until_get_finished": lambda: store.src_wait_until_get_finished("forked", timeout=1.0),
            "dest_get": lambda: store.dest_get("forked", timeout=1.0),
            "dest_finish_get": lambda: store.dest_finish_get("forked"),
            "barrier": lambda: store.barrier(timeout=1.0),
            "reset": lambda: store.reset(timeout=1.0),
            "empty": lambda: store.empty((NUMEL,), dtype=torch.float32),
            "close": lambda: store.close(),
        }
        for name, call in calls.items():
            try:
                call()
                answers[name] = "done"
            except BaseException as error:
                answers[name] = f"{type(error).__name__}: {error}"

        return answers

    def held(self):
        """Descriptors by kind, and mappings of shared memory."""
        kinds = Counter()
        for fd in os.listdir("/proc/self/fd"):
            try:
                kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]] += 1
            except OSError:
                pass  # the one that lists

        kinds["mapped"] = sum("memfd:dtorch" in line for line in Path("/proc/self/maps").read_text().splitlines())
        kinds["threads"] = threading.active_count()
        return {kind: number for kind, number in kinds.items() if not kind.startswith("/proc")}


def obey(line):
    """Do what comes by the line, one command after the other."""
    rank = Rank()
    rank.line = line
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead leave at once
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
        importlib.import_module(plugin)  # what an opening would import in each process

    registry()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
