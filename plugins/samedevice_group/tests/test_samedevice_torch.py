"""Programs of torch.distributed on the backends "samedevice" and "dtorch"; each rank is a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtorch_core import explain
from dtorch_core._selection.topology import imagine

PROGRAM = Path(__file__).with_name("torch_program.py")
LIMIT = 120.0
"""Seconds for all checks on a busy machine."""

CHECKS = (
    "who_we_are collectives objects monitored_barrier set_timeout batch_isend_irecv coalescing groups split_group "
    "functional_collectives operators_that_torch_serves_in_cpp device_mesh_and_dtensor ddp compiled_ddp "
    "ddp_with_sparse_gradients fsdp2 collectives_inside_backward groups_in_several_threads mismatch_is_told "
    "destroyed_and_begun_again "
    "barrier_ends_what_was_begun_before"
).split()

IN_DETAIL = (
    "collectives batch_isend_irecv coalescing groups functional_collectives ddp fsdp2 "
    "collectives_inside_backward groups_in_several_threads a_rank_that_dies"
).split()


def run(backend, world_size, checks, folder, dies=False, **environment):
    """What each check raised, on any rank."""
    path = os.pathsep.join(filter(None, [f"{sys.prefix}/upstream", os.environ.get("PYTHONPATH")]))  # NumPy
    command = [sys.executable, str(PROGRAM), backend]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(folder / "rendezvous"), ",".join(checks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        )
        for rank in range(world_size)
    ]
    raised = dict.fromkeys(checks, "")
    try:
        for rank, process in enumerate(processes):
            output, errors = process.communicate(timeout=LIMIT)
            if rank == world_size - 1 and dies:
                assert process.returncode < 0
                continue

            assert process.returncode == 0, f"rank {rank}:\n{errors}"
            for name, text in json.loads(output.splitlines()[-1]).items():
                raised[name] += text
    finally:
        for process in processes:
            process.kill()
            process.wait(LIMIT)

    return raised


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """Of four ranks on the backend that the selector chooses."""
    return run("dtorch", 4, CHECKS, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def raised_in_detail(tmp_path_factory):
    """Of two ranks on samedevice, with all that torch can check switched on."""
    folder = tmp_path_factory.mktemp("detail")
    return run("samedevice", 2, IN_DETAIL, folder, dies=True, TORCH_DISTRIBUTED_DEBUG="DETAIL")


@pytest.mark.skipif(
    explain("store", imagine(2, "processes")).chosen is None, reason="no store that is installed reaches processes"
)
class TestProgram:
    @pytest.mark.parametrize("check", CHECKS)
    def test_runs_on_four_ranks(self, raised, check):
        assert raised[check] == ""

    @pytest.mark.parametrize("check", IN_DETAIL)
    def test_runs_with_debug_level_detail(self, raised_in_detail, check):
        assert raised_in_detail[check] == ""


class TestOneRank:
    def test_runs_alone(self, tmp_path):
        checks = "coalescing device_mesh_and_dtensor ddp fsdp2 destroyed_and_begun_again".split()
        raised = run("dtorch", 1, checks, tmp_path)
        assert "".join(raised.values()) == ""
