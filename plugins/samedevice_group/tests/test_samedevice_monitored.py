"""monitored_barrier: who is late is named, and the group goes on."""

from datetime import timedelta
from pathlib import Path

import pytest

from dtorch_core import AbortedError, StoreTimeoutError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import LIMIT, on_ranks


class TestMonitoredBarrier:
    def test_rank_that_is_late_is_named_and_the_group_goes_on(self):
        def body(pg, group):
            if pg.rank() == 2:
                pg.barrier().wait()
            else:
                words = "Rank 2 failed to pass" if pg.rank() == 0 else "Rank 1 successfully reached"
                with pytest.raises(StoreTimeoutError, match=words):
                    pg.monitored_barrier(timedelta(seconds=0.1))

                pg.barrier().wait()

        on_ranks(body, 3)

    def test_all_that_are_late_are_named(self):
        def body(pg, group):
            if pg.rank() == 0:
                with pytest.raises(StoreTimeoutError, match="Ranks 1, 2 failed to pass"):
                    pg.monitored_barrier(0.1, wait_all_ranks=True)

            pg.barrier().wait()

        on_ranks(body, 3)

    def test_errors_say_what_is_waited_for(self):
        """Not how: no message, and no tag of one."""

        def body(pg, group):
            if pg.rank() == 0:
                with pytest.raises(StoreTimeoutError, match=r"in 0\.1 s: rank 1 had not come after 0\.1 s$"):
                    pg.monitored_barrier(0.1)

            pg.barrier().wait()
            if pg.rank() == 1:
                pg.shutdown()
                return

            with pytest.raises(StoreTimeoutError) as caught:
                pg.monitored_barrier(LIMIT)

            assert pg.rank() or "waiting for rank 1: rank 1 (pid" in str(caught.value)
            assert "tag" not in str(caught.value)

        on_ranks(body, 3)

    def test_the_end_of_the_group_is_told_and_no_rank_is_blamed_for_it(self):
        def body(pg, group):
            if pg.rank() == 2:
                group.abort("no more data")
                return

            for _ in range(2):  # one that it ends, and one that comes after the end
                with pytest.raises(AbortedError, match="monitored_barrier.*no more data") as caught:
                    pg.monitored_barrier(LIMIT, wait_all_ranks=True)

                assert "failed to pass" not in str(caught.value)

        on_ranks(body, 3)

    def test_nobody_passes_before_all_are_there(self):
        here = []

        def body(pg, group):
            pg.barrier().wait()
            here.append(pg.rank())
            pg.monitored_barrier()
            assert len(here) == 3

        on_ranks(body, 3)
