"""Messages over the four steps."""

import threading
import time
from pathlib import Path

import pytest
import torch

from dtorch_core import StoreTimeoutError, UnsupportedOperationError
from dtorch_core.testing import Background, asleep

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import four_steps
    from four_steps import LIMIT, on_ranks

registered = four_steps.registered


class TestMessages:
    def test_messages_are_in_order_for_each_source_and_tag(self):
        def body(store):
            others = [rank for rank in range(3) if rank != store.rank]
            for number in range(30):
                for dst in others:
                    store.send(torch.tensor([100 * store.rank + number]), dst, number % 2)

            for src in others:
                receipts = [store.expect(src, number % 2) for number in range(30)]
                for number, receipt in reversed(list(enumerate(receipts))):
                    message, source = receipt.wait(LIMIT)
                    assert (int(message), source) == (100 * src + number, src)
                    assert receipt.wait(LIMIT)[0] is message
                    assert receipt.done()

        on_ranks(body, 3)

    def test_message_is_a_copy(self):
        def body(store):
            if store.rank == 0:
                x = torch.arange(3.0)
                store.send(x, 1, 0)
                x.fill_(-1)
                store.barrier()
            else:
                store.barrier()
                message, _ = store.expect(0, 0).wait(LIMIT)
                assert message.tolist() == [0, 1, 2]
                message.fill_(-2)

        on_ranks(body)

    def test_receipt_stays_expected_after_a_timeout_and_can_be_cancelled(self):
        def body(store):
            if store.rank == 0:
                store.barrier()
                for value in range(3):
                    store.send(torch.tensor(value), 1, 0)

                return

            first, second, third = (store.expect(0, 0) for _ in range(3))
            with pytest.raises(StoreTimeoutError, match="rank 0 had not sent it"):
                first.wait(0.05)

            assert not first.done()
            assert second.cancel()
            store.barrier()
            assert int(first.wait(LIMIT)[0]) == 0
            assert int(third.wait(LIMIT)[0]) == 2
            assert int(store.expect(0, 0).wait(LIMIT)[0]) == 1, "a cancelled receipt's message goes to the next one"
            assert not first.cancel()

        on_ranks(body)

    def test_looking_does_not_wait_for_a_thread_that_waits(self):
        def body(store):
            if store.rank == 0:
                store.barrier()
                store.send(torch.tensor(7), 1, 0)
                return

            receipt = store.expect(0, 0)
            call = Background(lambda: receipt.wait(LIMIT))
            asleep(call)
            begun = time.monotonic()
            assert not receipt.done()
            with pytest.raises(StoreTimeoutError):
                receipt.wait(0.05)

            assert time.monotonic() - begun < LIMIT / 3
            called = threading.Event()
            receipt.add_done_callback(called.set)
            store.barrier()
            assert int(call.result(LIMIT)[0]) == 7
            assert called.wait(LIMIT)

        on_ranks(body)

    def test_any_source_is_refused(self):
        def body(store):
            with pytest.raises(UnsupportedOperationError, match="any source"):
                store.expect(None, 0)

        on_ranks(body, 1)

    def test_keys_of_messages_that_were_taken_are_freed(self):
        def body(store):
            for number in range(200):
                store.send(torch.tensor([number]), store.rank, 0)
                assert int(store.expect(store.rank, 0).wait(LIMIT)[0]) == number

            return len(store._session.keys._keys)

        assert on_ranks(body, 1)[0] < 5

    def test_many_unread_messages_cost_little(self):
        def body(store):
            begun = time.monotonic()
            for number in range(2000):
                store.send(torch.tensor([number]), 0, 0)

            took = time.monotonic() - begun
            for number in range(2000):
                assert int(store.expect(0, 0).wait(LIMIT)[0]) == number

            return took

        assert on_ranks(body, 1)[0] < 3

    def test_message_to_a_rank_that_left_does_not_fail_the_next_one(self):
        left = threading.Event()

        def body(store):
            if store.rank == 2:
                store.close()
                left.set()
                return

            assert left.wait(LIMIT)
            for number in range(5):
                if store.rank == 0:
                    store.send(torch.tensor(0), 2, 0)
                    store.send(torch.tensor(number), 1, 0)
                else:
                    assert int(store.expect(0, 0).wait(LIMIT)[0]) == number

        on_ranks(body, 3)
