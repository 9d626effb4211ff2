"""CUDA tensors between processes that share a GPU: the four steps, messages and collectives.

The programs that the ranks run are in ``file_cuda_store_programs.py`` and ``file_cuda_group_programs.py``: to start a
process and to begin CUDA takes seconds, so each team of processes runs them all, one after the other.
"""

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from dtorch_file_store.cuda import exports, imports
from dtorch_file_store.cuda.driver import Driver

from dtorch_core import spawn
from dtorch_core.testing import TensorStoreTests, ThreadGroupTests

pytest.importorskip("dtorch_samedevice_group")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LIMIT = 120.0
GPU = "cuda:0"

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    RANKS = importlib.import_module("file_cuda_ranks")

TEAMS = {
    # ranks, ranks in each process, environment
    "3 processes": (3, 1, {}),
    "2 processes of 2": (4, 2, {}),
    "2 processes": (2, 1, {}),
    "4 processes": (4, 1, {}),
    "expandable segments": (2, 1, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
}

PLAYED = {
    "3 processes": RANKS.names("store"),
    "2 processes of 2": RANKS.names("store") + RANKS.names("group"),
    "2 processes": RANKS.names("group"),
    "4 processes": RANKS.names("group"),
    "expandable segments": [
        *RANKS.names("memory without a handle"),
        "ordered_on_the_current_stream",
        "rewritten_in_place_after_the_wait",
        "one_buffer_again_and_again",
        "written_by_a_consumer",
        "kept_while_a_stream_still_reads_it",
        "given_back",
        "every_dtype_and_layout",
        "to_the_cpu",
        "collectives_of_every_dtype",
        "collectives_behind_a_late_rank",
        "buffers_again_and_again",
        "many_in_flight",
        "messages",
    ],
}


@pytest.fixture(scope="module")
def played():
    """What became of a team's programs, by rank; played once."""
    found = {}

    def play(team):
        if team not in found:
            world_size, each, environment = TEAMS[team]
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(str(Path(RANKS.__file__).parent))  # the new processes are given sys.path
                for name, value in environment.items():
                    patch.setenv(name, value)
                    patch.setenv(name.replace("ALLOC", "CUDA_ALLOC"), value)  # until torch 2.8 it was called so

                found[team] = spawn(
                    RANKS.play,
                    world_size,
                    args=(PLAYED[team],),
                    ranks_as="processes",
                    threads_per_process=each,
                    devices=GPU,
                    timeout=LIMIT,
                )

        return found[team]

    return play


@pytest.mark.parametrize(("team", "program"), [(team, name) for team in TEAMS for name in PLAYED[team]])
def test_processes(played, team, program):
    failed = [said[program] for said in played(team) if said[program] is not None]
    assert not failed, "\n".join(failed)


@pytest.fixture
def on_gpu(request):
    """What the kit tests on a GPU, in this process."""
    words = getattr(request.function, "capabilities", ())
    on_cpu = request.node.callspec.params.get("device") == "cpu" if hasattr(request.node, "callspec") else False
    if on_cpu or "multi_process" in words or ("cuda" not in words and "device" not in request.fixturenames):
        pytest.skip("it is not about CUDA, or about other processes")


@pytest.fixture
def node_each(on_gpu, monkeypatch):
    """Each rank is a node though its peers are threads beside it, which CUDA forbids to map each other's memory: what
    a node maps is the memory itself. So every test of the kit that is about CUDA shows what nodes say to each other.
    """
    bases = {}
    own = Driver.ipc_handle

    def ipc_handle(self, base):
        handle = own(self, base)
        bases[handle] = base
        return handle

    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))
    monkeypatch.setattr(Driver, "ipc_handle", ipc_handle)
    monkeypatch.setattr(Driver, "ipc_open", lambda self, handle: bases[handle])
    monkeypatch.setattr(Driver, "ipc_close", lambda self, address: None)
    monkeypatch.setattr(imports, "this_process", lambda: "another one")
    monkeypatch.setattr(exports, "foreign", Counter())


@pytest.fixture
def file_store(monkeypatch):
    """Groups of threads are over it, too."""
    monkeypatch.setenv("DTORCH_STORE", "file")


@pytest.mark.usefixtures("node_each")
class TestNodeEach(TensorStoreTests):
    backend = "file"


@pytest.mark.usefixtures("node_each", "file_store")
class TestGroupOfNodes(ThreadGroupTests):
    backend = "samedevice"


@pytest.mark.usefixtures("on_gpu", "file_store")
class TestGroupOfOneNode(ThreadGroupTests):
    backend = "samedevice"
