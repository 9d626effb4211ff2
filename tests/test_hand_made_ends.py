"""What the ranks of a process that nobody of ours has started hear of its end: what ended it, as far as it is known."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("dtorch_file_store")
pytest.importorskip("dtorch_samedevice_group")

LIMIT = 120.0
"""Seconds for all of it on a busy machine; most of them are for importing torch."""

PROGRAM = """
import sys

import torch
from dtorch_core import PeerLostError, open_group

rank, folder, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
group = open_group("ends", rank=rank, world_size=2, rendezvous=f"file://{folder}/meeting", timeout=60)
group.all_reduce(torch.ones(3))
if rank == 1:
    if end == "exit":
        sys.exit(7)

    if end == "raise":
        raise ValueError("boom")

    if end == "told":
        try:
            raise PeerLostError("rank 5 was lost")
        except PeerLostError as error:
            raise RuntimeError("no more to do") from error

    sys.exit()

try:
    group.all_reduce(torch.ones(3))
except PeerLostError as error:
    print(error)
"""

LEFT = r"has left group 'ends' \(closed it, returned, or its process ended\), so nobody can"


@pytest.mark.parametrize(
    ("end", "status", "heard"),
    [
        ("raise", 1, r"rank 1 \(pid {pid}\) was lost: rank 1 failed: ValueError: boom; open"),
        ("exit", 7, rf"rank 1 \(pid {{pid}}\) {LEFT}"),
        ("return", 0, rf"rank 1 \(pid {{pid}}\) {LEFT}"),
        ("told", 1, rf"rank 1 \(pid {{pid}}\) {LEFT}"),
    ],
)
def test_peer_hears_what_ended_the_process(tmp_path, end, status, heard):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DTORCH_")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(file), str(rank), str(tmp_path), end],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, errors = processes[0].communicate(timeout=LIMIT)
        assert processes[0].returncode == 0, errors
        assert re.search(heard.format(pid=processes[1].pid), said), said
        processes[1].communicate(timeout=LIMIT)
        assert processes[1].returncode == status
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=LIMIT)
