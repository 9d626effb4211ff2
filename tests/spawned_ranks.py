"""What ranks of a spawn over processes run: another process imports this module."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from dtorch_core import AbortedError, PeerLostError, spawn

LIMIT = 60.0


class Meeting:
    """The ranks say and hear that they have come somewhere."""

    def __init__(self, ctx):
        self.ctx, self.store = ctx, ctx._scope.rendezvous.clone()

    def say(self, what):
        self.store.set(f"{what}/{self.ctx.rank}", str(time.monotonic()))

    def hear(self, what, *ranks):
        self.store.wait([f"{what}/{rank}" for rank in ranks])

    def all(self, what):
        self.say(what)
        self.hear(what, *range(self.ctx.world_size))


def who(ctx, *args):
    return ctx.rank, ctx.world_size, ctx.device, threading.current_thread().name, os.getpid(), args


def opened(ctx, queue, values, name):
    queue.put((ctx.rank, os.getpid()))
    values += ctx.rank
    with ctx.open_store(name, timeout=LIMIT) as store:
        found = store.topology, str(store.selection)

    manager = ctx.open_manager()
    return *found, values, torch.get_num_threads(), (manager.rank, manager.world_size), sys.exc_info()


def connections_of_groups(ctx, number):
    """How many connections this process has to other ports, before and after so many new process groups."""
    values = torch.ones(1)
    dist.all_reduce(values)
    before = _connections()
    for turn in range(number):
        group = dist.new_group()
        dist.all_reduce(values, group=group)
        if turn % 2:
            dist.destroy_process_group(group)

    dist.barrier()
    return before, _connections(), values.item()


def _connections():
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            found |= {f"socket:[{line.split()[9]}]" for line in file.readlines()[1:]}

    return len(found & {_link(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")})


def _link(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


def tensors(ctx):
    whole = torch.arange(1_000_000) + ctx.rank
    return {
        "large": torch.arange(25_000_000, dtype=torch.float32).add_(ctx.rank),
        "view": whole[10:13],
        "conj": torch.tensor([1 + 2j, ctx.rank + 0j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "bfloat16": torch.arange(4, dtype=torch.bfloat16),
        "float8": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        "grad": torch.arange(3.0, requires_grad=True) * 2,
        "scalar": torch.tensor(ctx.rank),
        "empty": torch.empty(0, 3),
        "expanded": torch.arange(3).expand(2, 3),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.arange(2.0)),
    }


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fails(ctx):
    Meeting(ctx).all("begun")
    if ctx.rank == 1:
        error = ValueError("with a lock")
        error.lock = threading.Lock()
        raise error from KeyError("the cause")

    ctx.open_store("nobody else comes", timeout=LIMIT)


def fails_oddly(ctx, how):
    if how == "odd":
        raise OddError("this", "that")

    if how == "exit":
        sys.exit(5)

    return [threading.Lock()]


def dies(ctx, how, victim):
    meeting = Meeting(ctx)
    meeting.all("begun")
    if ctx.rank == victim:
        if how == "fork" and not os.fork():
            time.sleep(LIMIT)  # it has copies of all that the killed one had open

        if how == "status":
            os._exit(3)

        os.kill(os.getpid(), signal.SIGKILL)

    ctx.open_store("nobody else comes", timeout=LIMIT)


def told(ctx):
    """Rank 0 hears of the loss, and raises, before anybody has seen it."""
    meeting = Meeting(ctx)
    meeting.all("begun")
    if ctx.rank == 0:
        raise PeerLostError("rank 1 is gone")

    try:
        ctx.open_store("nobody else comes", timeout=LIMIT)
    except AbortedError:  # spawn has heard of rank 0
        os.kill(os.getpid(), signal.SIGKILL)


def survives(ctx, queue, how):
    """Say what the others hear of rank 1's end."""
    store = ctx.open_store("x", timeout=LIMIT)
    store.barrier()
    if ctx.rank == 1:
        if how == "raises":
            raise ValueError("first")

        os.kill(os.getpid(), signal.SIGKILL)

    try:
        store.barrier()
    except PeerLostError as error:
        queue.put((ctx.rank, str(error)))
        raise


def busy(ctx, how):
    Meeting(ctx).all("begun")
    if ctx.rank == 1 and how == "raises":
        raise ValueError("first")

    if ctx.rank == 1 and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)

    if ctx.rank != 1 and how != "stopped":
        time.sleep(LIMIT)


def quiet(ctx):
    """Returns; a thread of it goes on for a while."""
    threading.Thread(target=time.sleep, args=(0.5,)).start()
    return os.getpid()


def nests(ctx, ranks_as):
    return os.getpid(), spawn(who, 2, ranks_as=ranks_as, timeout=LIMIT)


def waits(ctx):
    ctx.open_store("nobody comes", timeout=LIMIT)
