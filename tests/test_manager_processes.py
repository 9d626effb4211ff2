"""ThreadGroupManager in processes that nobody of ours has started: all its groups meet at its own rendezvous."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from opening_ranks import free_port

pytest.importorskip("dtorch_file_store")
pytest.importorskip("dtorch_samedevice_group")

LIMIT = 120.0
"""Seconds for all of it on a busy machine; most of them are for importing torch."""

RANKS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor

import torch
from dtorch_core import PeerLostError, ThreadGroupManager, redistribute_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

MESH = [[0, 1], [2, 3]]


def manager_of(rank, name, rendezvous, timeout=60):
    return ThreadGroupManager(rank, 4, name=name, rendezvous=rendezvous, timeout=timeout)


def met(manager, ranks):
    group = manager.get(ranks)
    assert (group.rank, group.world_size) == (ranks.index(manager.rank), len(ranks))
    assert group.all_gather(torch.tensor([manager.rank])).tolist() == ranks


def in_different_orders(rank, rendezvous):
    '''Rows first on two ranks, columns first on the others; and all at once, the other way round.'''
    with manager_of(rank, "orders", rendezvous) as manager:
        row, column = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        for ranks in (row, column) if rank < 2 else (column, row):
            met(manager, ranks)

        with ThreadPoolExecutor(4) as threads:
            wanted = [row[::-1], column[::-1], [3, 1, 0, 2], [rank]]
            for outcome in [threads.submit(met, manager, ranks) for ranks in (wanted if rank % 2 else wanted[::-1])]:
                outcome.result(60)

        met(manager, [0, 1, 2, 3])


def without_rank_0(rank, rendezvous):
    '''It leaves before the others need anything of it, and comes to none of their groups.'''
    with manager_of(rank, "without rank 0", rendezvous) as manager:
        if rank:
            met(manager, [3, 1, 2])
            if rank > 1:
                met(manager, [2, 3])


def over_a_mesh(rank, rendezvous):
    with manager_of(rank, "mesh", rendezvous) as manager:
        x = torch.ones(2, 4) * (rank + 1)
        moved = redistribute_mesh(x, manager, MESH, [Partial(), Shard(0)], [Shard(1), Replicate()])
        assert moved.tolist() == [[4, 4], [4, 4], [6, 6], [6, 6]]


def check(rank, rendezvous):
    for body in (in_different_orders, without_rank_0, over_a_mesh):
        body(rank, rendezvous)
"""

BY_HAND = RANKS + """
index, threads_each, tcp, env = map(int, sys.argv[1:5])
ranks = range(threads_each * index, threads_each * (index + 1))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(env), WORLD_SIZE="4")
for rendezvous in (f"tcp://127.0.0.1:{tcp}", "env://", None):  # None is env:// here, since WORLD_SIZE fits
    with ThreadPoolExecutor(len(ranks)) as threads:
        for outcome in [threads.submit(check, rank, rendezvous) for rank in ranks]:
            outcome.result(100)

    print(f"met at {str(rendezvous)[:3]}", flush=True)

sys.stdin.read()  # rank 0's process serves the others
"""

BY_TORCHRUN = RANKS + """
check(int(os.environ["RANK"]), None)
print(f"rank {os.environ['RANK']} is done\\n", end="", flush=True)
"""

SERVER_ENDS = RANKS + """
rank, port = int(sys.argv[1]) + 1, int(sys.argv[2])
if rank == 3:
    rank = 0

manager = manager_of(rank, "ends", f"tcp://127.0.0.1:{port}", timeout=1000)
if rank:
    met(manager, [2, 1])
    manager.get([2, 1]).barrier()

print("met", flush=True)
sys.stdin.readline()  # until rank 0 has ended
try:
    manager.get([1, 2])
except PeerLostError as error:
    print(error)

manager.close()
"""


@pytest.fixture
def start(tmp_path):
    """Processes of a program, each with its number and more arguments."""
    started = []

    def start(program, count, *arguments):
        file = tmp_path / "program.py"
        file.write_text(program)
        command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", str(file)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        for index in range(count):
            given = [*command, str(index), *map(str, arguments)]
            started.append(subprocess.Popen(given, env=environment(), **pipes))

        return started

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT)


def environment():
    """Without what a launcher or this suite's own environment says of ranks."""
    said = ("MASTER_", "TORCHELASTIC_", "DTORCH_")
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    return {name: value for name, value in os.environ.items() if not name.startswith(said) and name not in names}


def ended(process):
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    return out


class TestByHand:
    @pytest.mark.parametrize("processes", [4, 2])
    def test_groups_of_some_ranks_meet_at_every_kind_of_rendezvous(self, start, processes):
        started = start(BY_HAND, processes, 4 // processes, free_port(), free_port())
        for process in reversed(started):  # that of rank 0 last: it serves
            assert ended(process).splitlines() == ["met at tcp", "met at env", "met at Non"]

    def test_end_of_the_process_that_serves_is_told_at_once(self, start):
        """To those who open one more group: what they have open goes on."""
        one, two, server = started = start(SERVER_ENDS, 3, free_port())
        for process in started:
            assert process.stdout.readline() == "met\n", process.communicate(timeout=LIMIT)[1]

        server.kill()
        server.wait(LIMIT)
        for process in (one, two):
            said = ended(process)
            assert "open_group('ends/[1, 2]') at tcp://127.0.0.1" in said
            assert "the rendezvous is gone" in said and "has the process ended that serves it?" in said
            assert "(the group's ranks are, in this order, ranks [1, 2] of the manager 'ends')" in said


class TestTorchrun:
    def test_groups_of_some_ranks_meet_without_being_told_where(self, tmp_path):
        file = tmp_path / "program.py"
        file.write_text(BY_TORCHRUN)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        done = subprocess.run([*launcher, str(file)], env=environment(), capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split()) == sorted("rank is done".split() * 4 + list("0123"))
