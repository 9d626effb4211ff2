"""Stores that leave something behind, and what they left."""

import os
import threading

import torch
from dtorch_memory_store.store import MemoryTensorStore

from .base import HANG, wrong

OPENED, NAMES, MAPPED = [], [], []


@wrong("test_handshake_of_a_rank_that_is_alone")
class LeavesAThread(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        threading.Thread(target=threading.Event().wait, args=(HANG,), daemon=True).start()


@wrong("test_handshake_of_a_rank_that_is_alone")
class LeavesAFile(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        OPENED.append(open(os.devnull))


@wrong("test_handshake_of_a_rank_that_is_alone")
class LeavesAName(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        path = f"/dev/shm/dtorch-kit-test-{os.getpid()}"
        # Mapped, so that tests of other processes, which may look meanwhile, see whose it is.
        MAPPED.append(torch.from_file(path, shared=True, size=1, dtype=torch.uint8))
        NAMES.append(path)
