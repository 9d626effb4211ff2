"""Ranks in processes that nobody of ours has started: by hand, and by torchrun. They meet wherever they are told to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("dtorch_file_store")
pytest.importorskip("dtorch_samedevice_group")

LIMIT = 120.0
"""Seconds for all of it on a busy machine; most of them are for importing torch."""

OPEN = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from dtorch_core import open_group, open_store


def exchange(rank, world_size, rendezvous=None):
    '''What a store and a group over the ranks give: who published, and a sum.'''
    given = dict(rank=rank, world_size=world_size, rendezvous=rendezvous, timeout=60)
    with open_store("x", **given) as store, open_group("x", **given) as group:
        store.src_set(f"from {rank}", torch.arange(3) + 10 * rank, 1)
        got = store.dest_get_to_device(f"from {(rank + 1) % world_size}", "cpu").tolist()
        store.src_wait_until_get_finished(f"from {rank}")
        total = group.all_reduce(torch.arange(3) + rank).tolist()
        pids = [member.pid for member in group.topology]
        assert pids[rank] == os.getpid() and len(set(pids)) == 2
        return store.backend, group.backend, got, total


def check(rank, world_size, rendezvous=None):
    other = 10 * ((rank + 1) % world_size)
    expected = [x * world_size + world_size * (world_size - 1) // 2 for x in range(3)]
    outcome = exchange(rank, world_size, rendezvous)
    assert outcome == ("file", "samedevice", [other, other + 1, other + 2], expected), outcome
"""

BY_HAND = OPEN + """
index, port, other_port, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
line = dist.TCPStore("127.0.0.1", other_port, None, index == 0, wait_for_workers=False)
for rendezvous in (
    f"tcp://127.0.0.1:{port}",
    f"file://{folder}/url",
    "env://",
    None,  # env://, since the environment's WORLD_SIZE fits
    line,
    dist.PrefixStore("mine/", line),
    dist.FileStore(f"{folder}/store", 2),
):
    check(index, 2, rendezvous)
    print(f"2 ranks at {rendezvous.__class__.__name__}", flush=True)

# Two ranks in each process.
with ThreadPoolExecutor(2) as threads:
    for outcome in [threads.submit(check, rank, 4, line) for rank in (2 * index, 2 * index + 1)]:
        outcome.result(60)

print("4 ranks", flush=True)
if index == 0:
    sys.stdin.read()  # it serves the others, and they may still read: until they have ended
"""

BY_TORCHRUN = OPEN + """
check(int(os.environ["RANK"]), 2)
dist.init_process_group("gloo")  # torch's own meeting at the same place is none of ours, nor ours of it
check(int(os.environ["RANK"]), 2)
dist.barrier()
dist.destroy_process_group()
print(f"rank {os.environ['RANK']} is done\\n", end="", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(text))
        return str(file)

    return write


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment():
    """Without what a launcher or this suite's own environment says of ranks."""
    said = ("MASTER_", "TORCHELASTIC_", "DTORCH_")
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    return {name: value for name, value in os.environ.items() if not name.startswith(said) and name not in names}


class TestByHand:
    def test_processes_meet_at_every_kind_of_rendezvous(self, script, tmp_path):
        command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", script(BY_HAND)]
        where = [free_port(), free_port(), str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [
            subprocess.Popen([*command, str(index), *where], env=environment(), **pipes) for index in range(2)
        ]
        try:
            for process in reversed(processes):
                out, err = process.communicate(timeout=LIMIT)
                assert process.returncode == 0, err
                kinds = "str str str NoneType TCPStore PrefixStore FileStore".split()
                assert out.splitlines() == [*(f"2 ranks at {kind}" for kind in kinds), "4 ranks"]
        finally:
            for process in processes:
                process.kill()
                process.communicate(timeout=LIMIT)


class TestTorchrun:
    def test_its_ranks_meet_without_being_told_where(self, script):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*launcher, script(BY_TORCHRUN)], env=environment(), capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split("\n")) == ["", "rank 0 is done", "rank 1 is done"]
