"""For every suite of the repository."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: a test that collects it need not look at them every time."""
    gc.collect()
    gc.freeze()
