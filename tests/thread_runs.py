"""Runs of ranks that are threads: their bounds, and what may outlive them."""

import os
import threading

import pytest
import torch

LIMIT = 15.0

PROMPT = 3.0
"""Seconds in which a failing run has to be over: a second of grace, and slack for a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def driver():
    """What CUDA opens for itself it opens now."""
    for number in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{number}")


@pytest.fixture(autouse=True)
def nothing_outlives_a_run():
    before = set(threading.enumerate())
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield
    assert set(threading.enumerate()) <= before
    assert not files or len(os.listdir("/proc/self/fd")) <= files
