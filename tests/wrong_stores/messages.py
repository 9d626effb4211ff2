"""Stores whose messages go astray."""

import torch
from dtorch_memory_store.mail import Message
from dtorch_memory_store.store import MemoryTensorStore

from dtorch_core import StoreTimeoutError
from dtorch_core.mail import Receipt

from .base import wrong


@wrong("test_message_is_a_copy")
class SendsTheTensorItself(MemoryTensorStore):
    def send(self, tensor, dst, tag, *, stream=None):
        self._session.letters.deliver(Message(self.rank, tag, tensor, None), dst)


@wrong("test_messages_are_in_order_for_each_source_and_tag[sent]")
class DeliversTheLatestFirst(MemoryTensorStore):
    def expect(self, src, tag):
        self._session.letters._letters[self.rank].reverse()
        receipt = super().expect(src, tag)
        self._session.letters._letters[self.rank].reverse()
        return receipt


@wrong("test_messages_are_in_order_for_each_source_and_tag[expected]")
class KnowsNoTags(MemoryTensorStore):
    def send(self, tensor, dst, tag, *, stream=None):
        super().send(tensor, dst, 0, stream=stream)

    def expect(self, src, tag):
        return super().expect(src, 0)


@wrong("test_message_to_oneself")
class SendsNothingToItself(MemoryTensorStore):
    def send(self, tensor, dst, tag, *, stream=None):
        if dst != self.rank:
            super().send(tensor, dst, tag, stream=stream)


class _Onward(Receipt):
    """Another receipt; each below changes one thing."""

    def __init__(self, receipt):
        self._receipt = receipt

    def wait(self, timeout, stream=None):
        return self._receipt.wait(timeout, stream)

    def done(self):
        return self._receipt.done()

    def cancel(self):
        return self._receipt.cancel()

    def add_done_callback(self, callback):
        self._receipt.add_done_callback(callback)


@wrong("test_message_that_is_late_stays_expected")
class ExpectsNothingLate(MemoryTensorStore):
    class Once(_Onward):
        def wait(self, timeout, stream=None):
            try:
                return super().wait(timeout, stream)
            except StoreTimeoutError:
                self.cancel()
                raise

    def expect(self, src, tag):
        return self.Once(super().expect(src, tag))


@wrong("test_message_of_a_cancelled_receipt_goes_to_the_next_one")
class LosesWhatWasCancelled(MemoryTensorStore):
    class Keeps(_Onward):
        def cancel(self):
            return not self.done()

    def expect(self, src, tag):
        return self.Keeps(super().expect(src, tag))


@wrong("test_message_is_told_when_it_comes")
class CallsNobodyBack(MemoryTensorStore):
    class Silent(_Onward):
        def add_done_callback(self, callback):
            pass

    def expect(self, src, tag):
        return self.Silent(super().expect(src, tag))


@wrong("test_message_from_anybody_comes_or_is_refused")
class TakesAnybodyForRankZero(MemoryTensorStore):
    def expect(self, src, tag):
        return super().expect(src or 0, tag)


@wrong("test_message_of_a_rank_that_left")
class DropsTheLettersOfWhoLeft(MemoryTensorStore):
    def close(self):
        if self.rank == 1:
            self._session.letters._letters[0].clear()

        super().close()


@wrong("test_message_of_a_rank_that_dies")
class WaitsForTheDead(MemoryTensorStore):
    class Deaf(_Onward):
        def wait(self, timeout, stream=None):
            try:
                return super().wait(timeout, stream)
            except ConnectionError:
                raise StoreTimeoutError("nothing came from rank 2") from None

    def expect(self, src, tag):
        return self.Deaf(super().expect(src, tag))


@wrong("test_message_is_a_copy")
class LosesStridesOnTheWay(MemoryTensorStore):
    def send(self, tensor, dst, tag, *, stream=None):
        flat = torch.as_strided(tensor, tensor.shape, tensor.new_empty(tensor.shape).stride())
        super().send(flat, dst, tag, stream=stream)
