"""The file promise: what every promise owes, and what is its own."""

from __future__ import annotations

from dtorch_core.testing import PromiseTests


class TestFilePromise(PromiseTests):
    backend = "file"
