"""``dtorch bench --profile``: the functions that are timed, and the steps that their times make."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dtorch_core.bench.profile import Call, calls_of, rows
from dtorch_core.bench.steps import CALL, POST, SIGNAL, SLEEP, STEPS, TURN, WAKE_UP
from dtorch_core.bench.stopwatch import Cost, Span, Stopwatch, cost

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import bench_runs
    from bench_runs import inner

dtorch = bench_runs.dtorch


class Example:
    """Whose functions are stopped."""

    def outer(self, number):
        return self.inner(number) + 1

    def inner(self, number):
        return inner(number)


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
