"""The memory promise."""

from __future__ import annotations

from dtorch_core.testing import PromiseTests


class TestMemoryPromise(PromiseTests):
    backend = "memory"
