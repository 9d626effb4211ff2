"""``dtorch bench``: what it makes of what was measured."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dtorch_core.bench import collectives, exchange, facts, goals, report
from dtorch_core.bench.collectives import PROCESSES, Plan
from dtorch_core.bench.floors import FLOOR, HAND_OFF
from dtorch_core.bench.groups import DTORCH, THREADED
from dtorch_core.bench.peers import GLOO, NCCL
from dtorch_core.bench.processes import SOCKET
from dtorch_core.bench.sizes import GIB, KIB, MIB
from dtorch_core.bench.team import Team
from dtorch_core.bench.timing import Series

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import bench_runs

measured = bench_runs.measured


class TestReport:
    def test_fraction_is_that_of_the_limit_that_takes_longer(self, measured):
        small, _, large = measured.collectives.values()
        assert collectives.limits(DTORCH, small) == [FLOOR, HAND_OFF]
        assert small.fraction(DTORCH, [FLOOR, HAND_OFF]) == pytest.approx(50 / 40, rel=0.01)
        assert large.fraction(DTORCH, [FLOOR, HAND_OFF]) == pytest.approx(9 / 10, rel=0.02)
        assert collectives.limits(NCCL, small) == [] and collectives.limits(FLOOR, small) == []

    def test_tables(self, measured):
        first, second = [list(table) for table in report.tables(measured)]
        head, small, _, large = first
        assert head.split("  ")[0] == "2 ranks" and head.count("of limit") == 4
        found = "40.1 us 1.25 80.2 us 0.75 901.0 us 0.07 1.1 us 60.0 us 91.9 us 0.54 50.0 us 60.0 us"
        assert small.split() == ["all_reduce", "1", "KiB", *found.split()]
        assert "6.98 ms" in large and "0.89" in large
        assert second[0].split()[:6] == "2 ranks: time = fixed cost".split()
        ours = next(line for line in second if DTORCH in line)
        assert ours.split()[-4:] == ["40.0", "us", "9.00", "GiB/s"]
        assert not any(HAND_OFF in line for line in second), "it has no bytes"

    def test_line_without_a_bandwidth_is_explained(self, measured):
        said = "bandwidth -: the larger sizes took no longer"
        assert said not in list(report.tables(measured))[1]
        small, large = list(measured.collectives)[:2]
        flat = report.Measured({small: Series({DTORCH: [80e-6]}), large: Series({DTORCH: [60e-6]})})
        *_, row, last = list(report.tables(flat))[1]
        assert row.endswith(" us          -") and last == said

    def test_size_of_its_own_is_in_the_name(self):
        series = Series({exchange.PUBLISHED: [20e-6], exchange.PUBLISHED_SMALL: [10e-6]})
        (table,) = report.tables(report.Measured(exchange={3 * KIB: series}))
        names = [line.split("  ")[0] for line in list(table)[1:]]
        assert names == ["src_set, processes", "src_set, processes, always 1 KiB"]

    def test_facts_are_json_with_each_round(self, measured):
        fitted = list(report.lines(measured.collectives))
        found = list(goals.of_all(measured))
        told = json.loads(json.dumps(facts.facts({"torch": "2"}, measured, fitted, found, ["one"])))
        assert set(told) == {
            "setting", "collectives", "lines", "exchange", "exchange on a gpu", "all_reduce, a gpu each", "goals",
            "skipped",
        }  # fmt: skip
        cell = told["collectives"][0]
        assert {name: cell[name] for name in ("operation", "bytes", "ranks", "device")} == {
            "operation": "all_reduce", "bytes": KIB, "ranks": 2, "device": "cpu"
        }  # fmt: skip
        assert set(cell["subjects"]) == {
            DTORCH, THREADED, PROCESSES, GLOO, NCCL, FLOOR, HAND_OFF, SOCKET
        }  # fmt: skip
        ours = cell["subjects"][DTORCH]
        assert ours["limits"] == [FLOOR, HAND_OFF] and len(ours["rounds"]) == 3
        assert ours["median_seconds"] == ours["rounds"][0]
        assert ours["fraction_of_limit"] == pytest.approx(1.25, rel=0.01)
        assert cell["subjects"][NCCL]["fraction_of_limit"] is None
        line = next(line for line in told["lines"] if line["subject"] == GLOO)
        assert line["fixed_seconds"] == pytest.approx(900e-6) and line["bytes_per_second"] == pytest.approx(GIB)
        assert told["skipped"] == ["one"]

    def test_goals_hold_or_are_missed(self, measured):
        found = {goal.text: goal for goal in goals.of_all(measured) if goal.at_most is not None}
        assert {text: (goal.at_most, goal.held) for text, goal in found.items()} == {
            "all_reduce, 1 KiB: times a bare hand-off there and back": (0.9, True),
            "all_reduce, 1 KiB, processes: times a round trip through a socket": (1.2, False),
            "all_reduce, 64 MiB: times the blocked floor": (1.25, True),
            "all_reduce, 64 MiB, processes: times the blocked floor": (1.8, False),
        }
        text = list(report.goals_table(list(found.values())))
        assert len(text) == 5 and text[1].endswith("held") and text[2].endswith("MISSED")

    def test_large_calls_on_a_gpu_are_queued_too(self):
        plan = Plan("cuda:0", operations=("all_reduce", "barrier"), sizes=(KIB, 256 * MIB))
        small, waited, queued, barrier = plan.cells(2)
        assert [cell.queued for cell in (small, waited, queued, barrier)] == [False, False, True, False]
        assert str(queued) == "all_reduce, 256 MiB, queued, 2 ranks" and str(waited) == "all_reduce, 256 MiB, 2 ranks"
        assert not any(cell.queued for cell in Plan("cpu", sizes=(256 * MIB,)).cells(2))
        series = Series({DTORCH: [0.4e-3], FLOOR: [0.31e-3]})
        measured = report.Measured({waited: series, queued: series})
        found = {goal.text: (goal.at_least, goal.held) for goal in goals.of_all(measured) if goal.at_least is not None}
        assert found == {
            "all_reduce, 256 MiB, 2 ranks, one GPU: part of the bandwidth of a copy": (0.68, True),
            "all_reduce, 256 MiB, queued, 2 ranks, one GPU: part of the bandwidth of a copy": (0.8, False),
        }
        assert [line.split()[:4] for line in next(report.tables(measured))][1:] == [
            ["all_reduce", "256", "MiB", "400.0"], ["all_reduce", "256", "MiB,", "queued"]
        ]  # fmt: skip
        assert list(report.lines(measured.collectives)) == []

    def test_calls_are_over_when_the_clock_stops(self):
        done = []
        with closing(Team(1)) as team:
            team.time([lambda: done.append("call")], 2, lambda: done.append("end"))

        assert done == ["call", "end", "call", "call", "end"]
