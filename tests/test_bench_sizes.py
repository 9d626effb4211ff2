"""``dtorch bench``: sizes, what a cell holds and moves, and the line that times lie on."""

from __future__ import annotations

import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from dtorch_core.bench import collectives, exchange, sizes
from dtorch_core.bench.cells import MOST_RANKS, OPERATIONS, Buffers, Cell
from dtorch_core.bench.collectives import Plan
from dtorch_core.bench.fit import fit
from dtorch_core.bench.sizes import GIB, KIB, MIB, TIB


class TestFit:
    def test_points_of_a_line_give_the_line(self):
        line = fit({nbytes: 35e-6 + nbytes / (7 * GIB) for nbytes in (KIB, MIB, 64 * MIB, GIB)})
        assert line.fixed == pytest.approx(35e-6) and line.bandwidth == pytest.approx(7 * GIB)
        assert line.seconds(MIB) == pytest.approx(35e-6 + MIB / (7 * GIB))

    def test_small_size_counts_as_much_as_a_large_one(self):
        # An error of a hundredth of the large size is 100 times the small size's time.
        found = {KIB: 100e-6, 32 * KIB: 100e-6 + 32 * KIB / GIB, GIB: 1.01}
        assert fit(found).fixed == pytest.approx(100e-6, rel=0.01)

    def test_no_other_line_is_closer(self):
        found = {KIB: 90e-6, MIB: 400e-6, 8 * MIB: 2e-3, 64 * MIB: 19e-3}
        line = fit(found)

        def squares(fixed, bandwidth):
            return sum(((fixed + nbytes / bandwidth - seconds) / seconds) ** 2 for nbytes, seconds in found.items())

        best = squares(*line)
        for factor in (0.98, 1.02):
            assert squares(line.fixed * factor, line.bandwidth) > best
            assert squares(line.fixed, line.bandwidth * factor) > best

    def test_time_that_does_not_grow_has_no_bandwidth(self):
        line = fit({KIB: 80e-6, MIB: 60e-6})
        assert math.isinf(line.bandwidth) and 60e-6 < line.fixed < 80e-6

    def test_fixed_cost_is_never_negative(self):
        line = fit({KIB: 1e-9, MIB: 100e-6, GIB: 0.3})
        assert line.fixed == 0 and line.bandwidth > 0

    def test_one_size_is_no_line(self):
        with pytest.raises(ValueError, match="a line needs two sizes, not 1"):
            fit({KIB: 1.0})


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "nbytes", "said"),
        [
            ("1KiB", KIB, "1 KiB"), ("64 mib", 64 * MIB, "64 MiB"), ("1GiB", GIB, "1 GiB"), ("2tib", 2 * TIB, "2 TiB"),
            ("1536", 1536, "1.5 KiB"),
        ],  # fmt: skip
    )
    def test_size_is_read_and_said(self, text, nbytes, said):
        if nbytes % KIB:
            with pytest.raises(ValueError, match="multiple of 1 KiB"):
                sizes.parse(text)
        else:
            assert sizes.parse(text) == nbytes

        assert sizes.size(nbytes) == said

    def test_memory_that_is_free_is_some(self):
        assert 0 < sizes.room("cpu") < 2**63

    def test_cell_that_has_no_room_is_skipped_with_a_line(self, monkeypatch):
        monkeypatch.setattr(collectives, "room", lambda device: 100 * KIB)
        monkeypatch.setattr(exchange, "room", lambda device: 100 * KIB)
        plan = Plan(ranks_as=("threads",), gloo=False, operations=("all_gather",), sizes=(MIB,))
        assert collectives.measure(plan, lambda text: None) == {}
        assert plan.skipped == ["all_gather, 1 MiB, 2 ranks: needs 6 MiB of memory, and 100 KiB are free"]

    def test_processes_that_have_no_room_are_skipped_with_a_line(self, monkeypatch):
        monkeypatch.setattr(collectives, "room", lambda device: 3 * collectives.PROCESS)
        monkeypatch.setattr(collectives, "group_crew", lambda ranks, device: SimpleNamespace(close=lambda: None))
        plan = Plan(ranks_as=("processes",), ranks=(4,), operations=("barrier",))
        assert collectives.measure(plan, lambda text: None) == {}
        assert plan.skipped == [
            "dtorch, processes, 4 ranks: the processes need about 640 MiB of memory, and 480 MiB are free",
            "Gloo, 4 ranks: the processes need about 640 MiB of memory, and 480 MiB are free",
        ]
        with ExitStack() as stack:
            collectives._World(plan, 2, stack)  # there is room for one of the two

        assert plan.skipped[2:] == [
            "Gloo, 2 ranks: the processes need about 320 MiB of memory, and 160 MiB are free",
        ]

    def test_sums_of_most_ranks_are_exact(self):
        cell = Cell("all_reduce", 4 * KIB, MOST_RANKS, "cpu")
        inputs = [Buffers.of(cell, rank).given for rank in range(MOST_RANKS)]
        assert torch.equal(sum(inputs[1:], inputs[0]).double(), sum(each.double() for each in inputs))

    @pytest.mark.parametrize("operation", OPERATIONS)
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_what_a_cell_holds_is_what_its_buffers_are(self, operation, ranks):
        cell = Cell(operation, 0 if operation == "barrier" else KIB, ranks, "cpu")
        buffers = [Buffers.of(cell, rank) for rank in range(ranks)]
        assert cell.held == sum(each.given.nbytes + each.taken.nbytes for each in buffers)

    def test_bytes_that_a_collective_moves(self):
        def moved(operation, ranks):
            return Cell(operation, MIB, ranks, "cpu").moved / MIB

        assert [moved("all_reduce", ranks) for ranks in (2, 4)] == [4, 8]
        assert [moved("all_gather", ranks) for ranks in (2, 4)] == [2 + 4, 4 + 16]
        assert [moved("reduce_scatter", ranks) for ranks in (2, 4)] == [2 + 1, 4 + 1]
        assert moved("all_to_all", 4) == 8 and moved("broadcast", 4) == 1 + 3
