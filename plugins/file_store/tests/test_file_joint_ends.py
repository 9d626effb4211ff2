"""Joint work that halts: it goes on in one thread, and where it can't it ends at once, for the right reason."""

import gc
import threading
import weakref

import pytest
import torch

from dtorch_core import AbortedError, CollectiveMismatchError, DtorchError, NoRoomError, PeerLostError, use_backend
from dtorch_core.testing import Background, run_ranks

LIMIT = 20.0
LARGE = 3_000_000


@pytest.fixture(autouse=True)
def node_each(monkeypatch):
    """Each rank is a node of its own: whatever it says goes over a socket, though its peer is a thread beside it."""
    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))


def session_of(group):
    return group.process_group._store._session


@pytest.mark.parametrize("when", ["before it", "amid it"])
def test_peer_that_can_not_do_its_part_says_so_to_who_is_at_its_own(when):
    """The news may come while this rank is at its part, and has to end the wait that follows."""
    told, at_it = threading.Event(), threading.Event()

    def body(ctx):
        with use_backend(store="file"), ctx.open_group("own", timeout=LIMIT) as group:
            group.barrier()
            node = session_of(group).node
            if group.rank == 1:

                def fail(nbytes):
                    assert when == "before it" or at_it.wait(LIMIT)
                    raise NoRoomError("no room today")

                session_of(group).arena.allocate = fail
                with pytest.raises(NoRoomError, match="no room today"):
                    group.all_reduce(torch.ones(LARGE))

                told.set()
            else:
                look_for = node.look_for

                def looks(come):
                    at_it.set()
                    assert told.wait(LIMIT)
                    node.look()
                    return look_for(come)

                node.look_for = looks
                with pytest.raises(DtorchError, match="rank 1 could not do its part: NoRoomError: no room today"):
                    group.all_reduce(torch.ones(LARGE))

            group.barrier()  # only this call is over

    run_ranks(body, 2, LIMIT)


@pytest.mark.parametrize("how", ["waits", "has not waited"])
def test_close_ends_a_call_that_is_under_way(how):
    """All have come, and a peer is slow: the rank's own close ends it, whoever waits and whenever."""
    halted, closed = threading.Event(), threading.Event()

    def body(ctx):
        with use_backend(store="file"), ctx.open_group("own", timeout=LIMIT) as group:
            group.barrier()
            session = session_of(group)
            if group.rank == 1:
                allocate = session.arena.allocate

                def slow(nbytes):
                    assert closed.wait(LIMIT)
                    return allocate(nbytes)

                session.arena.allocate = slow
                with pytest.raises(PeerLostError, match="rank 0"):
                    group.all_reduce(torch.ones(LARGE))

                return

            progress = session.joint._progress
            give_up = progress.give_up
            progress.give_up = lambda: [*give_up(), *(halted.set() or ())]  # called where a part halts
            work = group.all_reduce(torch.ones(LARGE), async_op=True)
            waiting = Background(work.wait, "waits") if how == "waits" else None
            assert halted.wait(LIMIT)
            group.close()
            closed.set()
            with pytest.raises(AbortedError, match="rank 0, collective #2, all_reduce.*: it was closed"):
                work.wait() if waiting is None else waiting.result(LIMIT)

    run_ranks(body, 2, LIMIT)


def test_halted_part_goes_on_in_one_thread():
    """Another thread may take it up as soon as it halts, while the one that has left it is on its way out."""

    def body(ctx):
        with use_backend(store="file"), ctx.open_group("own", timeout=LIMIT) as group:
            group.barrier()
            session, taken, halted = session_of(group), [], threading.Event()
            node, joint, after = session.node, session.joint, session.node.after
            node.look_for = lambda come: False  # so it halts

            def leaves(woken=()):
                after(woken)
                with node.mutex:
                    calls = [call for call in joint._calls.values() if call.steps is not None and not call.running]
                    if calls and not taken:
                        taken.append(calls[0])
                        calls[0].running = True  # for a job that another thread will do

                if taken:
                    halted.set()

            node.after = leaves
            work = group.all_reduce(torch.ones(LARGE), async_op=True)
            assert halted.wait(LIMIT)
            node.after = after
            with node.mutex:
                taken[0].running = False
                woken = list(joint._progress.moved(taken[0]))

            node.after(woken)
            assert work.result()[-1].item() == 2

    run_ranks(body, 2, LIMIT)


def test_failed_call_keeps_no_tensors():
    """Its error is kept for whoever waits later, the frames that it came through are not: nothing looks for cycles."""

    class Memory(bytearray):
        pass

    def body(ctx):
        with use_backend(store="file"), ctx.open_group("own", timeout=LIMIT) as group:
            kept = 0
            for _ in range(20):  # either rank may be the one whose thread finds the mismatch
                memory = Memory(400)
                seen = weakref.ref(memory)
                tensor = torch.frombuffer(memory, dtype=torch.float32)
                del memory
                with pytest.raises(CollectiveMismatchError):
                    group.all_reduce(tensor, op="sum" if group.rank else "max")

                group.barrier()
                del tensor
                kept += seen() is not None

            group.barrier()
            return kept

    collects = gc.isenabled()
    gc.disable()
    try:
        assert run_ranks(body, 2, LIMIT) == [0, 0]
    finally:
        if collects:
            gc.enable()
