"""An arena for a test, and what shared memory this process has. Imported by the tests of arenas."""

import gc
import os
import threading

import pytest
import torch
from dtorch_file_store.arena import Arena, Mapping

MIB = 1 << 20
LIMIT = 30.0


@pytest.fixture
def made():
    """The segments that the arena has announced."""
    return []


@pytest.fixture
def arena(made):
    arena = Arena("store 's'", made.append)
    yield arena
    arena.close()


def numbered(nbytes, start=0):
    """Bytes that tell where they belong."""
    return (torch.arange(nbytes) + start).remainder(251).to(torch.uint8)


def peer_of(segment):
    return Mapping(os.dup(segment.fd), segment.size)


def descriptors():
    return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_there(fd)}


def fd_is_there(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def traces():
    """How many descriptors and mappings of shared memory this process has."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("/memfd:dtorch" in line for line in maps)

    return sum("/memfd:dtorch" in target for target in descriptors().values()), mapped


def free_bytes(arena):
    gc.collect()
    with arena._mutex:
        arena._settle()
        return arena._extents.free_bytes()[0]


def run_threads(bodies):
    errors = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(LIMIT)

    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
