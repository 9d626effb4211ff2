"""What a reset ends, and what it does not."""

from pathlib import Path

import pytest
import torch

from dtorch_core import AbortedError, ProtocolError
from dtorch_core.testing import Background, asleep

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from memory_ranks import on_ranks


class TestReset:
    def test_barrier_that_a_reset_ended_does_not_count(self):
        """Its thread may not have woken when the ranks come to the next barrier."""

        def body(store):
            for _ in range(100):
                pending = Background(store.barrier) if store.rank == 1 else None
                if pending is not None:
                    asleep(pending, 0.02)

                try:
                    store.reset()
                except AbortedError:
                    raise AssertionError("reset itself was aborted") from None

                passed.append(store.rank)
                store.barrier()
                assert len(passed) % 3 == 0
                store.barrier()
                if pending is not None:
                    with pytest.raises(AbortedError):
                        pending.result()

        passed = []
        on_ranks(body, 3)

    def test_second_finish_after_a_reset_is_a_protocol_error(self):
        def body(store):
            store.src_set("k", torch.arange(3), 1)
            store.dest_get("k")
            store.reset()
            store.src_set("k", torch.arange(4), 1)
            store.dest_get("k")
            store.dest_finish_get("k")
            with pytest.raises(ProtocolError):
                store.dest_finish_get("k")

        on_ranks(body, 1)

    def test_finish_of_a_borrow_that_a_reset_ended_says_so(self):
        def body(store):
            store.src_set("k", torch.arange(3), 1)
            store.dest_get("k")
            store.reset()
            with pytest.raises(AbortedError, match="reset"):
                store.dest_finish_get("k")

            with pytest.raises(ProtocolError):
                store.dest_finish_get("k")

        on_ranks(body, 1)

    def test_wait_that_only_a_resetting_rank_could_satisfy_ends(self):
        def body(store):
            if store.rank == 0:
                with pytest.raises(AbortedError, match=r"reset\(\)"):
                    store.dest_get("k")

            store.reset()

        on_ranks(body, 2)
