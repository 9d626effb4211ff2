"""Messages: what ``send`` and ``expect`` owe, by the default that is made of the four steps or by a better way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from dtorch_core.errors import PeerLostError, StoreTimeoutError, UnsupportedOperationError
from dtorch_core.store import TensorStore
from dtorch_core.testing._store_base import SHORT, Ending, StoreConformance, coded, same


class MessageTests(StoreConformance):
    """A message arrives once, in order for each source and tag; or the wait for it says why not."""

    def _receive(self, store: TensorStore, src: int, tag: int, wanted: torch.Tensor) -> torch.Tensor:
        message, source = store.expect(src, tag).wait(self.patience / 2)
        assert source == src
        assert same(message, wanted), f"from rank {src} (tag {tag}): got {message}, not {wanted}"
        return message

    def test_message_is_a_copy(self, device: str) -> None:
        """The sender may write to its tensor at once, and the receiver to what it has got."""

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                tensor = coded(0, (3, 5), device)
                strided = coded(1, (3, 5), device).t()
                store.send(tensor, 1, 0)
                store.send(strided, 1, 0)
                tensor.fill_(-1)
                strided.fill_(-1)
                store.barrier()
                store.barrier()
                assert tensor.eq(-1).all()
                return

            store.barrier()
            got = self._receive(store, 0, 0, coded(0, (3, 5), device))
            got.zero_()
            self._receive(store, 0, 0, coded(1, (3, 5), device).t())
            store.barrier()

        self.ranks(body, 2, device)

    @pytest.mark.parametrize("first", ["sent", "expected"])
    def test_messages_are_in_order_for_each_source_and_tag(self, first: str) -> None:
        """Whichever receipt is waited for first, and whoever was sooner."""
        numbers = range(12)

        def body(store: TensorStore) -> None:
            def value(src: int, number: int) -> torch.Tensor:
                return coded(100 * src + number, device=self.home)

            def send() -> None:
                for number in numbers:
                    for dst in others:
                        store.send(value(store.rank, number), dst, number % 2)

            others = [rank for rank in range(3) if rank != store.rank]
            if first == "sent":
                send()
                store.barrier()

            # All of one tag before those of the other, so that a store which overlooks tags is seen.
            by_tag = sorted(numbers, key=lambda number: number % 2)
            receipts = {src: {number: store.expect(src, number % 2) for number in by_tag} for src in others}
            if first == "expected":
                store.barrier()
                send()

            for src in others:
                for number in reversed(numbers):
                    message, source = receipts[src][number].wait(self.patience / 2)
                    assert source == src
                    assert same(message, value(src, number)), f"message {number} of rank {src}: got {message}"
                    assert receipts[src][number].done()

        self.ranks(body, 3)

    def test_message_to_oneself(self) -> None:
        def body(store: TensorStore) -> None:
            for tag in range(3):
                store.send(coded(tag, device=self.home), store.rank, tag)

            for tag in reversed(range(3)):
                self._receive(store, store.rank, tag, coded(tag, device=self.home))

        self.ranks(body, 2)

    def test_message_that_is_late_stays_expected(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.barrier()
                for number in range(2):
                    store.send(coded(number, device=self.home), 1, 7)

                return

            first, second = store.expect(0, 7), store.expect(0, 7)
            for timeout in (0.0, SHORT):
                with pytest.raises(StoreTimeoutError, match="rank 0"):
                    first.wait(timeout)

            assert not first.done()
            store.barrier()
            for number, receipt in ((1, second), (0, first), (0, first)):  # again it is the same
                message, _ = receipt.wait(self.patience / 2)
                assert same(message, coded(number, device=self.home))

        self.ranks(body, 2)

    def test_message_of_a_cancelled_receipt_goes_to_the_next_one(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.barrier()
                for number in range(2):
                    store.send(coded(number, device=self.home), 1, 0)

                return

            cancelled, kept = store.expect(0, 0), store.expect(0, 0)
            assert cancelled.cancel()
            store.barrier()
            later = store.expect(0, 0)
            got = [receipt.wait(self.patience / 2)[0] for receipt in (kept, later)]
            wanted = [coded(number, device=self.home) for number in range(2)]
            assert any(same(got[0], each) and same(got[1], other) for each, other in (wanted, wanted[::-1]))
            assert not kept.cancel(), "its message is here"

        self.ranks(body, 2)

    def test_message_is_told_when_it_comes(self) -> None:
        """To a callback that was given before, and to one that is given afterwards."""

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.barrier()
                store.send(coded(0, device=self.home), 1, 0)
                return

            receipt, told, told_again = store.expect(0, 0), threading.Event(), threading.Event()
            receipt.add_done_callback(told.set)
            assert not told.is_set()
            store.barrier()
            assert told.wait(self.patience / 2), "nobody has called back"
            assert receipt.done()
            assert same(receipt.wait(0)[0], coded(0, device=self.home))
            receipt.add_done_callback(told_again.set)
            assert told_again.wait(self.patience / 2), "nobody has called back"

        self.ranks(body, 2)

    def test_message_from_anybody_comes_or_is_refused(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank != 1:
                store.send(coded(store.rank, device=self.home), 1, 0)
                return

            try:
                receipts = [store.expect(None, 0) for _ in range(2)]
            except UnsupportedOperationError:
                for src in (2, 0):
                    self._receive(store, src, 0, coded(src, device=self.home))

                return

            got = [receipt.wait(self.patience / 2) for receipt in receipts]
            assert sorted(src for _, src in got) == [0, 2]
            assert all(same(message, coded(src, device=self.home)) for message, src in got)

        self.ranks(body, 3)

    def test_message_of_a_rank_that_left(self) -> None:
        """What it sent before arrives; what it can't send any more is not waited for."""

        def body(store: TensorStore) -> None:
            if store.rank == 1:
                store.send(coded(1, device=self.home), 0, 0)
                store.close()
                return

            with pytest.raises(PeerLostError, match="rank 1"):
                store.dest_get("never set")  # until it has left

            self._receive(store, 1, 0, coded(1, device=self.home))
            with pytest.raises(PeerLostError, match="rank 1"):
                store.expect(1, 0).wait(self.patience / 2)

        self.ranks(body, 2)

    def test_message_of_a_rank_that_dies(self) -> None:
        """Waits for it end, pending and later ones; so do those for others, as all of that store."""

        def waits(store: TensorStore) -> tuple[Ending, Sequence[Ending]]:
            def receive(src: int) -> Ending:
                return lambda: store.expect(src, 0).wait(self.patience / 2)

            return receive(2), [receive(2), receive(1 - store.rank)]

        self.told_of_a_death(waits)
