"""A part of PyTorch's own suite on samedevice; `make upstream` runs all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("upstream") / "run.py"
PACKAGES = Path(sys.prefix) / "upstream"
"""Where `make test` puts what the suite needs besides torch."""

PART = (
    r"^test_(all_reduce_(sum|max|coalesced_sum|sum_async|sum_complex)|all_gather(_object_default_pg|_coalesced_simple)?|"
    r"broadcast_object_list|gather|scatter(_complex)?|barrier|get_rank|all_to_all_single_unequal_split|"
    r"all_to_all_full_group|reduce_scatter_tensor|send_recv_any_source|sparse_all_reduce_sum|monitored_barrier_gloo)$"
)


@pytest.fixture
def folder():
    """For what the suite leaves behind. Its name is short: sockets are made in it."""
    with tempfile.TemporaryDirectory(prefix="suite") as made:
        yield made


def test_part_of_the_suite_passes(folder):
    environment = {**os.environ, "TMPDIR": folder}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    needed = "import expecttest, numpy"
    if subprocess.run([sys.executable, "-c", needed], env=environment, capture_output=True, timeout=60).returncode:
        pytest.skip("what tests/upstream/requirements.txt names is not installed; make test does it")

    command = [sys.executable, str(RUN), "--backend", "samedevice", "--world-size", "3", "--match", PART, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    outcomes = json.loads(done.stdout)
    failed = [f"{name}:\n{entry['why']}" for name, entry in outcomes.items() if entry["outcome"] == "failed"]
    assert not failed, "\n".join([*failed, done.stderr[-5000:]])
    assert done.returncode == 0
    assert Counter(entry["outcome"] for entry in outcomes.values())["passed"] >= 18
