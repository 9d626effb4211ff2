"""Runs of ranks that are processes: their bounds, and what may outlive them."""

from __future__ import annotations

import importlib
import multiprocessing
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch.distributed as dist

from dtorch_core import spawn
from dtorch_core.testing._held import Held, left_behind

LIMIT = 60.0
"""Seconds that a run may take on a busy machine; most of them are for importing torch."""

PROMPT = 8.0
"""Seconds from a rank's failure to the end of its run on a busy machine, where nobody has to be killed."""


@pytest.fixture(scope="module", autouse=True)
def ranks():
    """The functions that ranks run: a module that other processes can import, since they are given ``sys.path``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("spawned_ranks")


@pytest.fixture(autouse=True)
def nothing_outlives_a_run():
    resource_tracker.ensure_running()
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # its library keeps a pipe for the next one
    before = Held.now()
    yield
    assert left_behind(before, 5.0) == []
    assert multiprocessing.active_children() == []


def processes(fn, world_size, *args, **options):
    return spawn(fn, world_size, args=args, ranks_as="processes", **{"timeout": LIMIT, **options})
