"""Groups that order CUDA streams wrongly."""

import torch
from dtorch_samedevice_group.group import SameDeviceProcessGroup

from .base import EndsWork, Works, wrong


class Unordered(EndsWork):
    def _end(self, timeout):
        call = self._ticket._call
        if not call.finished or call.error is not None:
            self._ticket._joint.wait_for(call, self._ticket._rank, timeout)


@wrong("test_cuda_result_is_ordered_after_every_ranks_work")
class OrdersNoStreamAfterTheWork(Works):
    work = Unordered


@wrong("test_cuda_result_is_ordered_after_every_ranks_work")
class WaitsOnTheHost(Works):
    class work(EndsWork):
        def _end(self, timeout):
            super()._end(timeout)
            if torch.cuda.is_available():
                torch.cuda.synchronize()


@wrong("test_cuda_wait_orders_the_waiting_stream")
class OrdersTheCallingStreamOnly(Works):
    class work(Unordered):
        def __init__(self, ticket, outputs, timeout):
            super().__init__(ticket, outputs, timeout)
            self._stream = torch.cuda.current_stream()

        def _end(self, timeout):
            super()._end(timeout)
            if self._ticket._call.queued is not None:
                self._ticket._call.queued.order(None, self._stream)


@wrong("test_cuda_result_is_ordered_after_every_ranks_work")
class ReadsBeforeTheInputsAreWritten(SameDeviceProcessGroup):
    def __init__(self, ctx):
        super().__init__(ctx)
        post = self._store.post

        def hasty(key, note, tensors, work, *, stream=None):
            idle = torch.cuda.Stream() if tensors and tensors[0].is_cuda else None
            return post(key, note, tensors, work, stream=idle)

        self._store.post = hasty
