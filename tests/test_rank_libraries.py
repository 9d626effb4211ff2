"""State that libraries keep in a dictionary of a class: ranks that are threads have one each."""

import importlib
import sys
import threading

import pytest

from dtorch_core import spawn
from dtorch_core._thread_ranks import libraries

LIMIT = 30.0

STATE = """
class PartialState:
    _shared_state = {}

    def __init__(self, **given):
        self.__dict__ = self._shared_state
        if not self.__dict__:
            self.given = given


class AcceleratorState(PartialState):
    _shared_state = {}


class GradientState:
    _shared_state = property(lambda self: {})  # the library's own way
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library with the names of the real one, not imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)

    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("")
    (tmp_path / "accelerate" / "state.py").write_text(STATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(libraries, "_divided", False)
    yield lambda: importlib.import_module("accelerate.state")
    for name in ("accelerate.state", "accelerate"):
        sys.modules.pop(name, None)


def run(fn, world_size=2):
    return spawn(fn, world_size, torch_distributed=True, timeout=LIMIT)


@pytest.mark.parametrize("when", ["before", "within"])
def test_each_rank_has_its_own(library, when):
    there = threading.Barrier(2, timeout=LIMIT)
    if when == "before":
        assert library().PartialState(who="the process").given == {"who": "the process"}

    def rank(ctx):
        state = library().PartialState
        mine = state(rank=ctx.rank)
        there.wait()
        assert mine.given == state(rank="late").given == {"rank": ctx.rank}
        library().AcceleratorState(other=ctx.rank)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(state().given))
        thread.start()
        thread.join(LIMIT)
        state._shared_state.clear()
        there.wait()
        assert state(rank=10 + ctx.rank).given == {"rank": 10 + ctx.rank}
        state()._shared_state = {"given": "set"}
        assert state._shared_state == {"given": "set"}
        return seen[0], library().AcceleratorState().given

    assert run(rank) == [({"rank": rank}, {"other": rank}) for rank in range(2)]
    outside = library().PartialState(who="late").given
    assert outside == {"who": "the process" if when == "before" else "late"}
    assert isinstance(vars(library().GradientState)["_shared_state"], property)


def test_ranks_of_a_rank_begin_with_nothing(library):
    def inner(ctx):
        return library().PartialState(inner=ctx.rank).given

    def rank(ctx):
        mine = library().PartialState(outer=ctx.rank)
        return run(inner), mine.given

    assert run(rank) == [([{"inner": 0}, {"inner": 1}], {"outer": rank}) for rank in range(2)]
