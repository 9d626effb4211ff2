"""Declared work: a result is written in whatever targets are at hand, and what must be copied first is found."""

from __future__ import annotations

import pytest
import torch

from dtorch_core._memory import own_bytes
from dtorch_core.declared import Place, Result, at_risk, compute
from dtorch_core.reduction import rule

SUM = rule("sum", torch.float32)


def tensor(code, count=12):
    return torch.arange(count) * 0.37 + code * 1.1


def in_rank_order(tensors):
    total = tensors[0]
    for other in tensors[1:]:
        total = total + other

    return total


class TestCompute:
    @pytest.mark.parametrize("at", range(4))
    @pytest.mark.parametrize("also", [0, 1])
    def test_reduction_in_place_of_any_source_keeps_the_order(self, at, also):
        """Source ``at`` is the target; others are beside it."""
        sources = [tensor(code) for code in (0.3, 7.7, 1e5, -1e5)]
        wanted = in_rank_order(sources)
        targets = [sources[at], *[torch.zeros(12) for _ in range(also)]]
        untouched = [source.clone() for source in sources]
        compute(SUM, None, sources, targets)
        assert all(torch.equal(target, wanted) for target in targets)
        others = [n for n in range(4) if n != at]
        assert all(torch.equal(sources[n], untouched[n]) for n in others)

    def test_reduction_in_place_of_all_sources(self):
        sources = [tensor(code) for code in range(4)]
        wanted = in_rank_order(sources)
        compute(SUM, None, sources, sources)
        assert all(torch.equal(source, wanted) for source in sources)

    @pytest.mark.parametrize("at", range(3))
    def test_reduction_that_is_accumulated_in_another_dtype(self, at):
        sources = [tensor(code).to(torch.bfloat16) for code in range(3)]
        wanted = in_rank_order([source.float() for source in sources]).to(torch.bfloat16)
        compute(rule("sum", torch.bfloat16), None, sources, [sources[at]])
        assert torch.equal(sources[at], wanted)

    def test_copy_to_several_and_to_itself(self):
        source, other = tensor(3), torch.zeros(12)
        compute(None, None, [source], [source, other])
        assert torch.equal(other, tensor(3))
        assert torch.equal(source, tensor(3))

    def test_copy_to_the_same_bytes_read_otherwise(self):
        source = torch.complex(tensor(1), tensor(2))
        wanted = source.conj().resolve_conj()
        target = torch.zeros(12, dtype=torch.complex64)
        compute(None, None, [source.conj()], [target])
        assert torch.equal(target, wanted)


def moved(target, source):
    return Result([target], [source])


class TestAtRisk:
    whole = tensor(0)
    first, second = Place(0, 0), Place(0, 1)

    def found(self, results, *tensors):
        return at_risk(results, {0: tensors})

    def test_separate_memory_is_safe(self):
        assert not self.found([moved(self.first, self.second)], tensor(1), tensor(2))

    def test_neighbours_in_one_memory_are_safe(self):
        assert not self.found([moved(self.first, self.second)], self.whole[:6], self.whole[6:])

    def test_nothing_overlaps_an_empty_tensor(self):
        assert not self.found([moved(self.first, self.second)], self.whole, self.whole[3:3])

    def test_the_same_view_in_one_result_is_safe(self):
        assert not self.found([moved(self.first, self.second)], self.whole[:6], self.whole[:6])
        assert not self.found([Result([self.first], [self.first], SUM)], self.whole, tensor(1))

    def test_the_same_view_in_another_result_is_at_risk(self):
        results = [moved(self.first, Place(1, 0)), moved(Place(1, 1), self.second)]
        assert self.found(results, self.whole[:6], self.whole[:6]) == [self.second]

    @pytest.mark.parametrize("shift", [1, 5])
    def test_another_position_is_at_risk(self, shift):
        results = [moved(self.first, self.second)]
        assert self.found(results, self.whole[:6], self.whole[shift : shift + 6]) == [self.second]
        assert self.found(results, self.whole[shift : shift + 6], self.whole[:6]) == [self.second]

    def test_the_same_memory_through_another_storage_is_at_risk(self):
        part = own_bytes(self.whole[4:8])
        assert part.untyped_storage().data_ptr() != self.whole.untyped_storage().data_ptr()
        assert self.found([moved(self.first, self.second)], self.whole[:6], part) == [self.second]

    def test_the_same_memory_in_another_order_is_at_risk(self):
        square = self.whole[:9].view(3, 3)
        assert self.found([moved(self.first, self.second)], square, square.t()) == [self.second]

    def test_the_same_memory_with_another_sign_is_at_risk(self):
        numbers = torch.complex(tensor(1), tensor(2))
        assert self.found([moved(self.first, self.second)], numbers, numbers.conj()) == [self.second]

    def test_ranks_of_one_process_are_looked_at_together(self):
        results = [moved(Place(0, 0), Place(1, 0)), moved(Place(2, 0), Place(3, 0))]
        tensors = [self.whole[:6], tensor(1), tensor(2), self.whole[2:8]]
        together = {rank: [each] for rank, each in enumerate(tensors)}
        assert at_risk(results, together) == [Place(3, 0)]
        assert not at_risk(results, {rank: together[rank] for rank in (0, 1, 2)})
        assert not at_risk(results, {3: together[3]})

    def test_each_is_named_once(self):
        results = [moved(Place(0, n), Place(0, 2)) for n in range(2)]
        assert self.found(results, self.whole[:6], self.whole[1:7], self.whole[2:8]) == [Place(0, 2)]
