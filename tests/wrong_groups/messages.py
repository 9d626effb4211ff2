"""Groups that send and receive wrongly."""

from dtorch_samedevice_group.group import SameDeviceProcessGroup

from dtorch_core import AbortedError

from .base import wrong


@wrong("test_messages_are_told_apart_by_tag")
class IgnoresTags(SameDeviceProcessGroup):
    def send(self, tensors, dst, tag=0):
        return super().send(tensors, dst, 0)

    def receive(self, src, tag, buffer=None):
        return super().receive(src, 0, buffer)


@wrong("test_messages_arrive_in_order")
class SendsTheLatestFirst(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        letters = self._store._session.letters._letters[self.rank()]
        letters.reverse()
        return super().receive(src, tag, buffer)


@wrong("test_message_is_a_copy")
class SendsTheTensorItself(SameDeviceProcessGroup):
    def send(self, tensors, dst, tag=0):
        work = super().send(tensors, dst, tag)
        letters = self._store._session.letters._letters[dst]
        if letters:
            letters[-1].tensor = tensors[0]

        return work


@wrong("test_receive_can_be_retried_after_a_timeout")
class LosesWhatComesAfterATimeout(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        work = super().receive(src, tag, buffer)
        work.cancel = lambda: False
        return work


@wrong("test_out_that_does_not_fit_a_message_is_an_error")
class FillsWhatFits(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        work = super().receive(src, tag, buffer)
        work._store = lambda message, source: message if buffer is None else fill(buffer, message)
        return work


def fill(buffer, message):
    count = min(buffer.numel(), message.numel())
    buffer.view(-1)[:count].copy_(message.view(-1)[:count])
    return buffer


@wrong("test_message_from_anybody")
class ListensToOneRankOnly(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        return super().receive(1 if src is None else src, tag, buffer)


@wrong("test_receive_from_a_rank_that_left")
class WaitsForTheGone(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        work = super().receive(src, tag, buffer)
        end = work._end

        def patiently(timeout):
            try:
                end(timeout)
            except ConnectionError:
                raise AbortedError("it will not come") from None

        work._end = patiently
        return work
