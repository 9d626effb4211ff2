"""Groups whose values are right, and whose Works are not."""

import torch
from dtorch_samedevice_group.group import SameDeviceProcessGroup

from .base import Around, EndsWork, Works, wrong


@wrong("test_call_returns_before_the_others_have_come[all_reduce]")
class WaitsInTheCall(Around):
    def around(self, name, call):
        work = call()
        work.wait()
        return work


@wrong("test_work_that_is_dropped_ends_all_the_same")
class WorksWhenItIsWaitedFor(SameDeviceProcessGroup):
    def allreduce(self, tensors, *opts):
        return Later(lambda: super(WorksWhenItIsWaitedFor, self).allreduce(tensors, *opts))


class Later:
    def __init__(self, begin):
        self._begin, self._work = begin, None

    def __getattr__(self, name):
        if self._work is None:
            self._work = self._begin()

        return getattr(self._work, name)


@wrong("test_work_carries_what_the_blocking_call_returns[DEVICE-all_reduce]")
class NeverFulfilsItsFutures(Works):
    class work(EndsWork):
        def _fulfil(self, future):
            pass


@wrong("test_many_in_flight_are_waited_for_in_any_order[DEVICE-2]")
class HasOneResultInFlight(SameDeviceProcessGroup):
    """The buffer of one call is that of the next."""

    def broadcast(self, tensors, *opts):
        kept = self.__dict__.setdefault("buffers", {}).setdefault(tensors[0].shape, tensors[0].clone())
        kept.copy_(tensors[0])
        return CopiesLater(super().broadcast([kept], *opts), kept, tensors[0])


class CopiesLater:
    def __init__(self, work, source, target):
        self._work, self._source, self._target = work, source, target

    def wait(self, timeout=None):
        self._work.wait(timeout)
        self._target.copy_(self._source)
        return True

    def __getattr__(self, name):
        return getattr(self._work, name)


@wrong("test_future_can_be_followed")
class FulfilsTooEarly(Works):
    class work(EndsWork):
        def get_future(self):
            future = torch.futures.Future()
            future.set_result([torch.zeros_like(tensor) for tensor in self._outputs])
            return future
