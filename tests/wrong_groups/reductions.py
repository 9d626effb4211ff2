"""Groups that reduce wrongly."""

import torch

from .base import Changes, wrong


class Reduces(Changes):
    """Its own all_reduce: the first offer's tensor becomes ``total``, the others' too."""

    def changed(self, name, work, offers):
        if name != "allreduce":
            return work(offers)

        total = self.total([offer.tensors[0].clone() for offer in offers], offers[0].note)
        return [lambda o=o: o.tensors[0].copy_(total) for o in offers]


@wrong("test_reduction_of_whole_numbers_is_exact_and_wraps[DEVICE-2]")
class SumsWhateverIsAsked(Reduces):
    def total(self, inputs, call):
        return sum(x.to(torch.int64) if not x.is_floating_point() else x for x in inputs)


@wrong("test_reduction_of_whole_numbers_is_exact_and_wraps[DEVICE-2]")
class RoundsAveragesDown(Changes):
    def changed(self, name, work, offers):
        first = offers[0].tensors[0]
        if name == "allreduce" and "avg" in offers[0].note and first.dtype is torch.int8:
            total = sum(offer.tensors[0].long() for offer in offers).div(len(offers), rounding_mode="floor")
            return [lambda o=o: o.tensors[0].copy_(total) for o in offers]

        return work(offers)


@wrong("test_floats_are_added_in_rank_order_on_every_rank_and_in_every_run[DEVICE-5]")
class AddsInTheOrderOfArrival(Reduces):
    def total(self, inputs, call):
        return sum(reversed(inputs[:-1]), inputs[-1])


@wrong("test_half_precision_is_rounded_once")
class RoundsEachStep(Reduces):
    def total(self, inputs, call):
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x

        return total


@wrong("test_reduction_of_bool_is_logical[DEVICE-3]")
class AddsBools(Reduces):
    def total(self, inputs, call):
        return sum(x.to(torch.uint8) for x in inputs).eq(1) if inputs[0].dtype is torch.bool else sum(inputs)
