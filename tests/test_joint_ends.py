"""What ends joint work over the four steps, and when its tensors are their ranks' own again."""

import threading
from pathlib import Path

import pytest
import torch

from dtorch_core import AbortedError, PeerLostError, UnsupportedTensorError
from dtorch_core.testing import Background, asleep

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import four_steps
    from four_steps import LIMIT, add_up, held_until, on_ranks

registered = four_steps.registered


class TestEnds:
    def test_rank_that_leaves_before_the_work_ends_the_others_calls(self):
        """Also where other ranks are left, of which one might have satisfied what rank 0 waits for."""
        came, posted, left = (threading.Event() for _ in range(3))

        def body(store):
            if store.rank == 1:
                says = store.src_set

                def src_set(key, *args, **options):
                    says(key, *args, **options)
                    if "/note/" in key:
                        came.set()

                store.src_set = src_set
                ticket = store.post("left", "", (torch.ones(2),), add_up)
                assert came.wait(LIMIT)
                assert posted.wait(LIMIT)
                store.close()
                left.set()
                with pytest.raises(AbortedError):
                    ticket.wait(LIMIT)

                return

            if store.rank == 0:
                ticket = store.post("left", "", (torch.ones(2),), add_up)
                posted.set()
            else:
                assert left.wait(LIMIT)
                ticket = store.post("left", "", (torch.ones(2),), add_up)

            with pytest.raises(PeerLostError, match="rank 1"):
                ticket.wait(LIMIT / 2)

        on_ranks(body, 3)

    def test_tensor_that_the_store_refuses_ends_the_call_on_every_rank(self):
        def body(store):
            sets = store.src_set

            def refuses(key, tensor, *args, **options):
                if options.get("writable"):
                    raise UnsupportedTensorError("not today")

                sets(key, tensor, *args, **options)

            store.src_set = refuses if store.rank == 1 else sets
            with pytest.raises(UnsupportedTensorError, match="not today"):
                store.post("refused", "", (torch.ones(2),), add_up).wait(LIMIT / 2)

            store.src_set = sets
            good = torch.ones(1)
            store.post("good", "", (good,), add_up).wait(LIMIT / 2)
            assert good.item() == 3

        on_ranks(body, 3)

    @pytest.mark.parametrize("how", ["abort", "death", "close"])
    def test_tensors_are_their_ranks_own_once_its_call_has_raised(self, how):
        """Whatever ends it while the work is done: where that is in this process, the call raises behind it."""
        begun, release = threading.Event(), threading.Event()
        held = held_until(begun, release)

        def body(store):
            tensor = torch.ones(2)
            ticket = store.post("cut short", "", (tensor,), held)
            assert begun.wait(LIMIT)
            if store.rank == 1:
                call = Background(lambda: ticket.wait(LIMIT))
                asleep(call)
                store.barrier()
                if how == "close":
                    store.close()

                call.thread.join(0.2)
                assert call.thread.is_alive(), "its tensor is being written"
                release.set()
                with pytest.raises(AbortedError if how != "death" else PeerLostError):
                    call.result(LIMIT)

                assert tensor.tolist() == [3.0, 3.0]
                return

            store.barrier()
            if store.rank == 2 and how != "close":
                store.abort("on purpose", died=how == "death")

            assert release.wait(LIMIT)

        on_ranks(body, 3)

    def test_rank_that_dies_ends_every_wait(self):
        waiting = threading.Event()

        def body(store):
            if store.rank == 1:
                assert waiting.wait(LIMIT)
                store.abort("rank 1 failed: on purpose", died=True)
                return

            call = Background(lambda: store.post("x", "", (torch.ones(1),), add_up).wait(60))
            asleep(call)
            waiting.set()
            with pytest.raises(PeerLostError, match="rank 1"):
                call.result(LIMIT)

        on_ranks(body)
