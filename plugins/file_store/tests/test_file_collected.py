"""The garbage collector runs in any thread, under whatever lock that holds: what it lets go there is no deadlock."""

import gc
import threading

import pytest
from dtorch_file_store import arena, headroom
from dtorch_file_store.headroom import VARIABLE
from dtorch_file_store.segments import Segment

from dtorch_core import NoRoomError, use_backend
from dtorch_core.testing import Background, run_ranks

LIMIT = 10.0
MIB = 1 << 20


@pytest.fixture(autouse=True)
def collector():
    """It runs where a test says so, and nowhere else."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def node_each(monkeypatch):
    """Each rank is a node of its own."""
    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))


@pytest.mark.usefixtures("node_each")
def test_handle_collected_while_its_memory_grows(monkeypatch):
    """The work goes on without the handle, which says goodbye when that is found to be garbage: in its midst."""
    collected = []

    def grow(number, size):
        if threading.current_thread().name == "the work":
            collected.append(gc.collect())

        return Segment(number, size)

    monkeypatch.setattr(arena, "Segment", grow)

    def body(ctx):
        with use_backend(store="file"), ctx.open_group("own", timeout=LIMIT) as group:
            store = ctx.open_store("own", backend="file", timeout=LIMIT)
            group.barrier()
            if group.rank == 0:
                memory, cycle = store._session.arena, [store]
                cycle.append(cycle)
                del store, cycle
                Background(lambda: memory.allocate(20 * MIB), "the work").result(LIMIT)

            group.barrier()

    run_ranks(body, 2, 2 * LIMIT)
    assert any(collected)


def test_segment_collected_while_memory_is_refused(monkeypatch):
    limit = headroom.BUDGET.held // MIB * MIB + 8 * MIB
    monkeypatch.setenv(VARIABLE, str(limit))
    segment, text = Segment(0, 4 * MIB), headroom.size_text
    cycle = [segment.memory]
    cycle.append(cycle)
    segment.close()
    del segment, cycle
    monkeypatch.setattr(headroom, "size_text", lambda nbytes: (gc.collect(), text(nbytes))[1])
    with pytest.raises(NoRoomError, match="this process holds"):
        # More than there is ever room for: what the test before has left may still go, in threads of its own.
        Background(lambda: Segment(1, limit + MIB), "refused").result(LIMIT)
