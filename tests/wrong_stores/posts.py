"""Stores whose joint work is not joint, or not the work that was posted."""

import threading

from dtorch_memory_store.store import MemoryTensorStore

from dtorch_core import CollectiveMismatchError, PeerLostError, StoreTimeoutError
from dtorch_core.joint import Onward

from .base import wrong


@wrong("test_post_hands_every_note_to_the_work_once")
class MixesUpTheOffers(MemoryTensorStore):
    def post(self, key, note, tensors, work, *, stream=None):
        return super().post(key, note, tensors, lambda offers: work(offers[::-1]), stream=stream)


@wrong("test_post_hands_every_note_to_the_work_once")
class WorksTwice(MemoryTensorStore):
    def post(self, key, note, tensors, work, *, stream=None):
        return super().post(key, note, tensors, lambda offers: [*work(offers), *work(offers)], stream=stream)


@wrong("test_post_works_on_the_tensors_themselves[cpu-at once]")
class WorksOnCopies(MemoryTensorStore):
    def post(self, key, note, tensors, work, *, stream=None):
        return super().post(key, note, [tensor.clone() for tensor in tensors], work, stream=stream)


@wrong("test_post_works_on_the_tensors_themselves[cpu-in parts]")
class LeavesOutTheTasks(MemoryTensorStore):
    def post(self, key, note, tensors, work, *, stream=None):
        return super().post(key, note, tensors, lambda offers: work(offers)[:1], stream=stream)


@wrong("test_posts_may_come_in_any_order")
class PostsOneAfterTheOther(MemoryTensorStore):
    def post(self, *args, **kw):
        ticket = super().post(*args, **kw)
        ticket.wait(self.timeout)
        return ticket


@wrong("test_post_tells_every_rank_what_the_work_raised")
class HidesWhatTheWorkRaised(MemoryTensorStore):
    class Ticket(Onward):
        def wait(self, timeout, stream=None):
            try:
                super().wait(timeout, stream)
            except CollectiveMismatchError:
                pass

    def post(self, *args, **kw):
        return self.Ticket(super().post(*args, **kw))


@wrong("test_post_is_told_when_it_is_done")
class CallsNobodyBackAfterWork(MemoryTensorStore):
    class Ticket(Onward):
        def add_done_callback(self, callback):
            pass

    def post(self, *args, **kw):
        return self.Ticket(super().post(*args, **kw))


@wrong("test_post_that_ranks_gave_up_is_dead")
class GivesUpQuietly(MemoryTensorStore):
    class Ticket(Onward):
        def wait(self, timeout, stream=None):
            over = threading.Event()
            self.add_done_callback(over.set)
            if not over.wait(timeout):
                raise StoreTimeoutError("rank 0 or rank 1 had not come")

            super().wait(timeout, stream)

    def post(self, *args, **kw):
        return self.Ticket(super().post(*args, **kw))


@wrong("test_post_that_is_being_worked_on_is_given_up_by_nobody")
class GivesUpWhatHasBegun(GivesUpQuietly):
    pass


@wrong("test_post_ends_with_a_rank_that_dies")
class SaysNotWhoDied(MemoryTensorStore):
    class Ticket(Onward):
        def wait(self, timeout, stream=None):
            try:
                super().wait(timeout, stream)
            except PeerLostError:
                raise PeerLostError("somebody died") from None

    def post(self, *args, **kw):
        return self.Ticket(super().post(*args, **kw))
