"""Ctrl-C anywhere in the file store: nothing is lost or done twice, and nobody waits for what does not come."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from dtorch_file_store.link import Link
from dtorch_file_store.reading import Reading
from dtorch_file_store.wire import frame

from dtorch_core import DtorchError, open_group, open_store, use_backend
from dtorch_core.testing import Background

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from file_interrupts import interrupts

LIMIT = 20.0
TIMEOUT = 10.0
"""Of the ranks. No wait of theirs lasts so long."""

MOST = 300


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, receiver = Link(here, 1), Link(there, 0)
    yield sender, receiver
    sender.close()
    receiver.close()


def take(link, got):
    """As a node does it."""
    with link.reading:
        link.pull()
        if link.unhandled:
            for kind, (number,), _ in link.messages():
                fd = link.take_fd() if kind == "fd" else None
                got.append((number, None if fd is None else os.readlink(f"/proc/self/fd/{fd}")))
                if fd is not None:
                    os.close(fd)

            link.unhandled = False


def queue_some(link, fds):
    """Some of them are joined, some have descriptors, and one is larger than what the socket takes at once."""
    for number in range(6):
        link.queue(frame("some", number, body=bytes(40_000 if number == 4 else 10)))
        if number % 3 == 1:
            link.queue(frame("fd", number), fds[number // 3])


def expected(fds):
    return [
        (number, name)
        for number in range(6)
        for name in (None, *([os.readlink(f"/proc/self/fd/{fds[number // 3]}")] if number % 3 == 1 else []))
    ]


@pytest.mark.parametrize("at", ["sender", "receiver"])
def test_what_is_sent_arrives_once(ends, at):
    sender, receiver = ends
    fds = [os.memfd_create(f"fd {number}") for number in range(2)]
    for interrupt in interrupts(MOST):
        got = []
        queue_some(sender, fds)
        with contextlib.suppress(KeyboardInterrupt):
            if at == "sender":
                with interrupt:
                    sender.flush()
            else:
                sender.flush()
                with interrupt:
                    receiver.pull()

        until = time.monotonic() + LIMIT
        while (sender.pending or len(got) < 8) and time.monotonic() < until:
            sender.flush()
            take(receiver, got)

        assert got == expected(fds), interrupt.place

    for fd in fds:
        os.close(fd)


def all_reduce(size):
    def run(group, rank):
        assert group.all_reduce(torch.full((size,), rank + 1.0)).eq(3).all()

    return run


def asynchronous(group, rank):
    assert group.all_reduce(torch.full((2,), rank + 1.0), async_op=True).result().tolist() == [3, 3]


def letters(group, rank):
    for _ in range(2):
        group.send(torch.arange(3) + rank, 1 - rank)
        assert group.recv(1 - rank).tolist() == [1 - rank, 2 - rank, 3 - rank]


def keys(store, rank):
    for size in (3, 10_000):
        for owner in range(2):
            if rank == owner:
                with store.publish("x", torch.full((size,), owner), get_count=1):
                    pass
            else:
                with store.borrow("x") as x:
                    assert x.eq(owner).all()


BODIES = {
    "all_reduce": (open_group, all_reduce(4)),
    "large all_reduce": (open_group, all_reduce(300_000)),
    "asynchronous": (open_group, asynchronous),
    "barrier": (open_group, lambda group, rank: group.barrier()),
    "letters": (open_group, letters),
    "keys": (open_store, keys),
    "reset": (open_store, lambda store, rank: store.reset()),
    "close": (open_store, lambda store, rank: store.close()),
}


TURNS = [(body, when) for body in BODIES for when in ("at once", "when it waits")]
TURNS.remove(("close", "when it waits"))  # it waits for nobody


@pytest.fixture
def peer_comes(request, monkeypatch):
    """An event before which the peer of an interrupted rank does nothing."""
    comes, wait = threading.Event(), Reading.wait

    def waits(self, *args):
        if threading.current_thread() is threading.main_thread():
            comes.set()

        return wait(self, *args)

    monkeypatch.setattr(Reading, "wait", waits)
    comes.always = request.param == "at once"
    return comes


def outcome(body, handle, rank):
    """What a rank gets: None, or an error that a rank may get."""
    try:
        body(handle, rank)
    except (DtorchError, KeyboardInterrupt) as error:
        return error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what it had opened is collected
@pytest.mark.parametrize(("body", "peer_comes"), TURNS, indirect=["peer_comes"])
def test_nobody_waits_for_an_interrupted_rank(body, peer_comes, monkeypatch):
    """Its peer has the right values or an error, and soon; it can close what it has opened."""
    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))
    opener, run = BODIES[body]

    def opened(rank):
        return opener("interrupted", rank=rank, world_size=2, timeout=TIMEOUT)

    def peer():
        with opened(1) as handle:
            here.set()
            assert peer_comes.wait(LIMIT)
            return [outcome(run, handle, 1) for _ in range(2 if opener is open_group else 1)]

    with use_backend(store="file"):
        for interrupt in interrupts(MOST):
            here = threading.Event()
            peer_comes.clear()
            other = Background(peer)
            handle = opened(0)
            assert here.wait(LIMIT)
            begun = time.monotonic()
            if peer_comes.always:
                peer_comes.set()

            with interrupt:
                outcome(run, handle, 0)

            peer_comes.set()
            if opener is open_group:  # it may go on, if its peer can
                outcome(run, handle, 0)

            handle.close()
            other.result(LIMIT)
            took = time.monotonic() - begun
            assert took < TIMEOUT / 2, interrupt.place
