"""``dtorch bench --plot``: what is drawn."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dtorch_core.bench import plot
from dtorch_core.bench.collectives import PROCESSES
from dtorch_core.bench.floors import FLOOR
from dtorch_core.bench.groups import DTORCH, THREADED
from dtorch_core.bench.peers import GLOO, NCCL
from dtorch_core.bench.sizes import GIB, KIB, MIB

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import bench_runs

measured = bench_runs.measured


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
