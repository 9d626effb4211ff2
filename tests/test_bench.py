"""``dtorch bench``: what it makes of its arguments and of what was measured; and one small run."""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types
from contextlib import closing
from multiprocessing import Pipe

import pytest

pytest.importorskip("torch")

from dtorch_core.bench import collectives, exchange, facts, goals, plot, report, sizes
from dtorch_core.bench.cells import OPERATIONS, Cell
from dtorch_core.bench.collectives import PROCESSES, Plan
from dtorch_core.bench.crew import Crew, RefusedError, answer
from dtorch_core.bench.fit import fit
from dtorch_core.bench.floors import FLOOR, HAND_OFF
from dtorch_core.bench.groups import DTORCH, THREADED
from dtorch_core.bench.peers import GLOO, NCCL
from dtorch_core.bench.processes import SOCKET
from dtorch_core.bench.profile import Call, calls_of, rows
from dtorch_core.bench.sizes import GIB, KIB, MIB
from dtorch_core.bench.steps import CALL, POST, SIGNAL, SLEEP, STEPS, TURN, WAKE_UP
from dtorch_core.bench.stopwatch import Cost, Span, Stopwatch, cost
from dtorch_core.bench.team import Team
from dtorch_core.bench.timing import Series
from dtorch_core.cli import bench, main
from dtorch_core.errors import PeerLostError


@pytest.fixture
def dtorch(capsys):
    def run(*arguments):
        capsys.readouterr()
        status = main(["bench", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def times(nbytes):
    """Three rounds in which each subject's time is a line of its own, and the second one was disturbed."""
    lines = {DTORCH: (40e-6, 9), PROCESSES: (80e-6, 4), GLOO: (900e-6, 1), FLOOR: (1e-6, 10), NCCL: (60e-6, 100)}
    lines[THREADED] = 90e-6, 0.5
    found = {name: [fixed + nbytes / (speed * GIB)] * 3 for name, (fixed, speed) in lines.items()}
    found |= {HAND_OFF: [50e-6] * 3, SOCKET: [60e-6] * 3}
    return Series({name: [each[0], each[1] * 5, each[2]] for name, each in found.items()})


@pytest.fixture
def measured():
    cells = [Cell("all_reduce", nbytes, 2, "cpu") for nbytes in (KIB, MIB, 64 * MIB)]
    return report.Measured({cell: times(cell.nbytes) for cell in cells})


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
        [("1KiB", KIB, "1 KiB"), ("64 mib", 64 * MIB, "64 MiB"), ("1GiB", GIB, "1 GiB"), ("1536", 1536, "1.5 KiB")],
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

    @pytest.mark.parametrize("operation", OPERATIONS)
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_what_a_cell_holds_is_what_its_buffers_are(self, operation, ranks):
        from dtorch_core.bench.cells import Buffers

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


class Drawn:
    """A stand-in for a part of matplotlib: it keeps what it is asked for."""

    def __init__(self, **named):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **named: self.calls.append((name, args, named))


class Figure(Drawn):
    made = None

    def subplots(self, rows, columns, squeeze):
        Figure.made = self
        self.axes = [[Drawn() for _ in range(columns)] for _ in range(rows)]
        return self.axes


class TestPlot:
    def test_one_line_for_each_subject(self, measured, monkeypatch, tmp_path):
        module = types.ModuleType("matplotlib.figure")
        module.Figure = Figure
        monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
        monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
        plot.plot(measured.collectives, tmp_path / "x.png")
        ((one,),) = Figure.made.axes
        drawn = {named["label"]: args for name, args, named in one.calls if name == "plot"}
        xs, ys = drawn[GLOO]
        assert xs == [KIB, MIB, 64 * MIB]
        assert ys[2] == pytest.approx(64 * MIB / (900e-6 + 64 * MIB / GIB) / GIB)
        assert set(drawn) == {DTORCH, THREADED, PROCESSES, GLOO, NCCL, FLOOR}, "a hand-off moves no bytes"
        assert ("savefig", (tmp_path / "x.png",), {"format": "png"}) in Figure.made.calls

    def test_matplotlib_draws_it(self, measured, tmp_path):
        pytest.importorskip("matplotlib")
        plot.plot(measured.collectives, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


class Example:
    """Whose functions are stopped."""

    def outer(self, number):
        return self.inner(number) + 1

    def inner(self, number):
        return inner(number)


def inner(number):
    if number < 0:
        raise ValueError("below zero")

    return 2 * number


HERE = [("outer", f"{__name__}:Example.outer"), ("inner", f"{__name__}:Example.inner")]


class TestStopwatch:
    @pytest.fixture
    def here(self, monkeypatch):
        monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(Example=Example))

    def test_functions_are_timed_and_left_as_they_were(self, here):
        before = dict(vars(Example))
        absent = [("gone", f"{__name__}:Example.gone"), ("not loaded", "no_such_module:f")]
        watch = Stopwatch([*HERE, *absent])
        watch.start()
        assert Example().outer(3) == 7
        with pytest.raises(ValueError, match="below zero"):
            Example().outer(-1)

        watch.stop()
        assert dict(vars(Example)) == before and watch.absent == [f"{__name__}:Example.gone"]
        spans = watch.taken(threading.get_ident())
        assert [span.step for span in spans] == ["inner", "outer"] * 2
        inner, outer = spans[:2]
        assert outer.begin <= inner.begin <= inner.end <= outer.end
        assert watch.taken(0) == []

    def test_its_own_cost_is_small_and_known(self):
        found = cost(calls=500, batches=5)
        assert 0 < found.within < found.whole < 20_000


class TestProfile:
    def test_time_of_a_step_is_its_own(self):
        watch = Cost(within=1, whole=4)
        spans = [
            Span(7, POST, 0, 5),  # of no call
            Span(7, "inner", 120, 130),
            Span(7, POST, 110, 150),
            Span(7, CALL, 100, 200),
            Span(7, SLEEP, 310, 390),
            Span(7, CALL, 300, 400),
        ]
        first, second = calls_of(spans, watch)
        # Each is without what its looks at the clock add; and without those within it, which cost the whole.
        assert dict(first.steps) == {CALL: 99 - (39 + 4), POST: 39 - (9 + 4), "inner": 9}
        assert (first.posted, first.signalled, first.spans) == (110, None, 3)
        assert second.steps[SLEEP] == 79 and second.sleeps == [spans[4]]

    def test_sleep_is_told_in_two_parts(self):
        def side(posted, signalled, *sleeps):
            steps = {CALL: 2000.0, **({SLEEP: sum(end - begin for _, _, begin, end in sleeps)} if sleeps else {})}
            return Call(steps, posted, signalled, list(sleeps), 1)

        early = side(100, None, Span(0, SLEEP, 1000, 9000))
        late = side(500, 6000)
        for of_ranks in ([[early] * 4, [late] * 4], [[late] * 4, [early] * 4]):
            told = {row.step: (row.waits, row.last) for row in rows(of_ranks)}
            assert told == {CALL: (2, 2), TURN: (5, None), WAKE_UP: (3, None)}

    @pytest.mark.parametrize(("step", "path"), STEPS)
    def test_functions_of_the_steps_are_there(self, step, path):
        module, _, name = path.partition(":")
        owner = pytest.importorskip(module)
        *classes, name = name.split(".")
        for each in classes:
            owner = getattr(owner, each)

        assert callable(vars(owner)[name])

    def test_profile_of_threads(self, dtorch):
        pytest.importorskip("dtorch_samedevice_group")
        status, out, _ = dtorch("--profile", "--ranks-as", "threads", "--rounds", "1")
        assert status == 0
        assert "all_reduce, 1 KiB, 2 ranks as threads, on cpu: microseconds of each step\n" in out
        for step in (CALL, POST, SIGNAL, TURN, WAKE_UP, "work: add up", "sum"):
            assert f"\n{step} " in out

        assert "not found" not in out


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--sizes", "12"], "a size is a multiple of 1 KiB, as in 1KiB, 64MiB or 1GiB, not '12'"),
            (["--max-bytes", "much"], "not 'much'"),
            (["--sizes", "1MiB", "--max-bytes", "1KiB"], "no size is left: all are larger than 1 KiB"),
            (["--operations", "allreduce"], "no 'allreduce'. Did you mean 'all_reduce'? There are: all_reduce, "),
            (["--profile", "bcast"], "--profile: there is no 'bcast'. Did you mean 'broadcast'?"),
            (["--plot", "x.png", "--only", "exchange"], "--plot is of the collectives"),
            (["--only", "own-gpus"], "--only own-gpus needs --device cuda"),
            (["--device", "cuda:99"], "there is no cuda:99: torch sees "),
            (["--json", "/no/such/folder/x.json"], "/no/such/folder/x.json can't be written"),
            (["--ranks", "none"], "must be a number of at least 1"),
        ],
    )
    def test_refusal(self, dtorch, monkeypatch, arguments, said):
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "matplotlib" or find(name))
        status, out, err = dtorch(*arguments)
        assert (status, out) == (2, "")
        assert said in err

    def test_plot_without_matplotlib_is_refused_before_anything_is_measured(self, dtorch, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        status, out, err = dtorch("--plot", "x.png")
        assert (status, out) == (2, "")
        assert err == 'dtorch bench: error: --plot needs matplotlib: pip install "dtorch-core[bench]"\n'

    def test_help_names_each_operation_and_size(self, dtorch):
        words = dtorch("--help")[1].replace(",", " ").replace("(", " ").split()
        assert set(OPERATIONS) <= set(words)
        assert {sizes.size(nbytes).replace(" ", "") for nbytes in sizes.SIZES} <= set(words)

    def test_sizes_end_at_the_largest(self):
        def chosen(**named):
            options = {"sizes": [], "max_bytes": None, "quick": False, "device": "cpu"}
            return list(bench._sizes(types.SimpleNamespace(**options | named)))

        assert chosen() == [nbytes for nbytes in sizes.SIZES if nbytes <= 64 * MIB]
        assert chosen(device="cuda:0")[-1] == 256 * MIB
        assert chosen(max_bytes="1GiB") == list(sizes.SIZES)
        assert chosen(sizes=["1GiB", "1KiB"]) == [KIB, GIB]
        assert chosen(quick=True) == [KIB, MIB, 64 * MIB]

    def test_other_commands_do_not_import_it_and_it_imports_no_plugin(self):
        code = (
            "import dtorch_core.cli, sys\n"
            "print([name for name in sys.modules if '.bench' in name])\n"
            "import dtorch_core.bench.program\n"
            "print([name for name in sys.modules if name.startswith('dtorch_') and not name.startswith('dtorch_core')])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout == "['dtorch_core.cli.bench']\n[]\n", done.stderr

    def test_what_is_not_installed_is_skipped_or_refused(self, dtorch, monkeypatch):
        from dtorch_core import NoBackendError
        from dtorch_core.bench import program

        error = NoBackendError("no store\nhere")
        monkeypatch.setattr(program, "choose", lambda kind, topology: (None, error if kind == "store" else None))
        status, out, err = dtorch("--sizes", "1KiB")
        assert (status, out) == (1, "") and err.startswith("dtorch bench: no store\nhere")


class TestCrew:
    def test_error_of_a_rank_is_its_answer(self):
        ours, theirs = Pipe()
        for question in (("prepare", "x", -1), ("prepare", "x", 5), ("time", "x", 3), ("time", "y", 3), ("end",)):
            ours.send(question)

        def prepare(number):
            base = inner(number)
            return lambda count: float(base + count)

        answer(theirs, prepare)
        answers = [ours.recv() for _ in range(4)]
        assert answers[0].startswith("ValueError: below zero")
        assert answers[1:3] == [0.0, 13.0]
        assert answers[3].startswith("KeyError: 'y'")

    def test_refusal_names_the_rank_and_leaves_no_answer_behind(self):
        pipes = [Pipe() for _ in range(2)]
        crew = Crew.__new__(Crew)
        crew._pipes = [ours for ours, _ in pipes]
        for said in ("ValueError: no", 1.5), (2.5, 3.5):
            for (_, theirs), each in zip(pipes, said, strict=True):
                theirs.send(each)

        with pytest.raises(RefusedError, match="^rank 0: ValueError: no$"):
            crew.ask("time", "x", 3)

        assert crew.ask("time", "x", 3) == [2.5, 3.5]

    def test_process_that_ends_is_named_and_closed(self):
        class Folder:
            def cleanup(self):
                self.clean = True

        def die(end):
            end.recv()
            os.kill(os.getpid(), signal.SIGKILL)

        context = multiprocessing.get_context("fork")
        crew = Crew.__new__(Crew)
        ours, theirs = context.Pipe()
        process = context.Process(target=die, args=(theirs,))
        process.start()
        theirs.close()
        crew._pipes, crew._processes, crew._folder = [ours], [process], Folder()
        with pytest.raises(PeerLostError, match=rf"^rank 0 \(pid {process.pid}\) ended .* exit code -9$"):
            crew.ask("time", "x", 3)

        crew.close()
        assert crew._folder.clean

    def test_queue_whose_process_ends_raises(self):
        import torch

        queues = exchange.Queues()
        queues.call(torch.arange(4.0))
        queues._process.kill()
        with pytest.raises(PeerLostError, match=rf"pid {queues._process.pid}\) ended"):
            queues.call(torch.arange(4.0))

        queues.close()

    def test_peer_that_refuses_is_skipped_with_a_line(self, monkeypatch):
        pytest.importorskip("dtorch_samedevice_group")

        class Refusing:
            def ask(self, *question):
                raise RefusedError("rank 0: RuntimeError: not on this device")

            def close(self):
                return

        monkeypatch.setattr(collectives, "gloo_crew", lambda ranks: Refusing())
        plan = Plan(ranks_as=("threads",), rounds=1, operations=("broadcast",), sizes=(KIB,))
        (series,) = collectives.measure(plan, lambda text: None).values()
        assert GLOO not in series and DTORCH in series
        assert plan.skipped == ["Gloo, broadcast, 1 KiB, 2 ranks: rank 0: RuntimeError: not on this device"]


class TestRun:
    def test_one_operation_of_threads(self, dtorch, tmp_path):
        pytest.importorskip("dtorch_samedevice_group")
        path = tmp_path / "bench.json"
        status, out, _ = dtorch(
            "--only", "collectives", "--ranks", "2", "--ranks-as", "threads", "--no-gloo", "--rounds", "2",
            "--operations", "all_reduce", "--sizes", "1KiB", "32KiB", "--json", str(path),
        )  # fmt: skip
        assert status == 0
        assert "\nall_reduce  1 KiB " in out and "\nall_reduce  32 KiB " in out and "fixed cost" in out
        told = json.loads(path.read_text())
        assert [cell["bytes"] for cell in told["collectives"]] == [KIB, 32 * KIB]
        for cell in told["collectives"]:
            assert 0 < cell["subjects"][DTORCH]["fraction_of_limit"] < 20
            assert len(cell["subjects"][DTORCH]["rounds"]) == 2

    def test_barrier_has_no_picture(self, dtorch, monkeypatch, tmp_path):
        pytest.importorskip("dtorch_samedevice_group")
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "matplotlib" or find(name))
        path = tmp_path / "x.png"
        status, out, _ = dtorch(
            "--only", "collectives", "--ranks", "2", "--ranks-as", "threads", "--no-gloo", "--rounds", "1",
            "--operations", "barrier", "--plot", str(path),
        )  # fmt: skip
        assert status == 0 and not path.exists()
        assert f"\nskipped: {path}: no collective of tensors was measured\n" in out

    def test_exchange_of_processes(self, dtorch):
        pytest.importorskip("dtorch_file_store")
        status, out, _ = dtorch(
            "--only", "exchange", "--ranks-as", "processes", "--rounds", "1", "--sizes", "1KiB", "--json"
        )  # fmt: skip
        assert status == 0
        (one,) = json.loads(out)["exchange"]
        assert set(one["subjects"]) == {*exchange._BY_CREW, exchange.PUBLISHED_SMALL, exchange.QUEUE}
        assert all(each["median_seconds"] > 0 for each in one["subjects"].values())
