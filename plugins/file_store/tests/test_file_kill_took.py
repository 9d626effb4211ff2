"""How soon survivors learnt of the deaths in the other files, which pytest runs before this one."""

import statistics
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_kill_ranks")
    from file_kill_ranks import LATENCIES

pytest.importorskip("dtorch_samedevice_group")

PROMPT = 0.1
"""Seconds in which a survivor learns of a death: the median."""


def test_median_of_what_survivors_took():
    """Over all rows that ran before."""
    if not LATENCIES:
        pytest.skip("no row has run")

    median = statistics.median(LATENCIES)
    print(f"{len(LATENCIES)} waits: median {1e3 * median:.1f} ms, worst {1e3 * max(LATENCIES):.1f} ms")
    assert median < PROMPT
