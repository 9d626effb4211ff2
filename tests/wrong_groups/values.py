"""Groups that bring wrong values."""

import torch
from dtorch_samedevice_group.group import SameDeviceProcessGroup

from dtorch_core.joint import Offer

from .base import Changes, wrong


@wrong("test_collective_of_even_shapes[DEVICE-3]")
class LosesTheLastRanksPart(Changes):
    def changed(self, name, work, offers):
        return work([*offers[:-1], offers[0]._replace(rank=offers[-1].rank)]) if name == "allreduce" else work(offers)


@wrong("test_collective_of_even_shapes[DEVICE-3]")
class ChangesItsInput(Changes):
    def changed(self, name, work, offers):
        tasks = work(offers)
        return [*tasks, lambda: offers[0].tensors[1].add_(1)] if name == "reduce_scatter" else tasks


@wrong("test_collective_of_even_shapes[DEVICE-8]")
class MixesUpTwoRanks(Changes):
    def changed(self, name, work, offers):
        if name == "allgather" and len(offers) > 3:
            inputs = [offer.tensors[-1] for offer in offers]
            inputs[2], inputs[3] = inputs[3], inputs[2]
            offers = [Offer(o.rank, o.note, (*o.tensors[:-1], x)) for o, x in zip(offers, inputs, strict=True)]

        return work(offers)


@wrong("test_collective_of_large_tensors[DEVICE-2]")
class LosesTheLastBlock(Changes):
    def changed(self, name, work, offers):
        if name != "allreduce" or offers[0].tensors[0].numel() < 1_000_000:
            return work(offers)

        whole = [offer.tensors[0] for offer in offers]
        return work([Offer(o.rank, o.note, (x[:-1],)) for o, x in zip(offers, whole, strict=True)])


@wrong("test_collective_of_any_layout[DEVICE-transposed]")
class TakesMemoryForContiguous(Changes):
    def changed(self, name, work, offers):
        def flat(tensor):
            return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())

        if name == "allgather":
            offers = [Offer(o.rank, o.note, tuple(map(flat, o.tensors))) for o in offers]

        return work(offers)


@wrong("test_collective_of_0_dim_tensors[DEVICE-2]")
class RefusesScalars(SameDeviceProcessGroup):
    def broadcast(self, tensors, *opts):
        assert tensors[0].dim() > 0
        return super().broadcast(tensors, *opts)


@wrong("test_collective_of_odd_and_empty_shapes[DEVICE-3]")
class SkipsWhatIsEmptySomewhere(Changes):
    def changed(self, name, work, offers):
        return () if any(t.numel() == 0 for o in offers for t in o.tensors) and name == "alltoall" else work(offers)


@wrong("test_all_gather_of_shards_that_differ")
class ExpectsShardsOfOneSize(Changes):
    def changed(self, name, work, offers):
        if name == "allgather" and len({offer.tensors[-1].shape for offer in offers}) > 1:
            return [lambda: offers[-1].tensors[0].zero_()]

        return work(offers)


@wrong("test_dtype_arrives_bit_for_bit[DEVICE-float32]")
class SendsNumbersNotBits(Changes):
    def changed(self, name, work, offers):
        tasks = work(offers)
        if name != "broadcast" or not offers[0].tensors[0].is_floating_point():
            return tasks

        return [*tasks, *(lambda o=o: o.tensors[0].copy_(o.tensors[0].float() + 1 - 1) for o in offers)]


@wrong("test_result_shares_no_memory[all_reduce]")
class HandsOutOneResult(SameDeviceProcessGroup):
    results = {}

    def allreduce(self, tensors, *opts):
        work = super().allreduce(tensors, *opts)
        work.wait()
        tensors[0].set_(self.results.setdefault((id(self._store._session), self._number()), tensors[0]))
        return work

    def _number(self):
        self.count = getattr(self, "count", 0) + 1
        return self.count
