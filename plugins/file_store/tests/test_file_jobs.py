"""Work that nobody waits for is done by whatever thread comes by: never under a lock, never one inside the other, and
never by a thread that keeps the others from reading.
"""

import threading

import pytest
import torch

from dtorch_core import use_backend
from dtorch_core.testing import Background, run_ranks

LIMIT = 20.0


@pytest.fixture(autouse=True)
def node_each(monkeypatch):
    """Each rank is a node of its own: whatever it says goes over a socket, though its peer is a thread beside it."""
    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))


def test_job_may_need_the_memory_that_is_growing():
    """A new segment is announced while the arena is held; a job that waits for its turn may need a block, too."""

    def body(ctx):
        with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
            node, made, done = store._session.node, [], threading.Semaphore(0)

            def job(turn):
                made.append(store.empty((9_000_000 << turn,), dtype=torch.uint8))
                done.release()

            for turn in range(3):
                node.jobs.append(lambda turn=turn: job(turn))
                made.append(store.empty((30_000_000 << turn,), dtype=torch.uint8))

            node.after()
            assert all(done.acquire(timeout=LIMIT) for _ in range(3))  # another thread may be at one
            store.barrier()
            return sorted(tensor.numel() for tensor in made)

    wanted = sorted(size << turn for turn in range(3) for size in (9_000_000, 30_000_000))
    assert run_ranks(body, 2, 2 * LIMIT) == [wanted, wanted]


@pytest.mark.parametrize("size", [3, 300_000], ids=["in words", "through buffers"])
def test_depth_does_not_grow_with_the_calls_in_flight(size):
    """Each is done in two parts, and ends the other's wait: a rank that is late finds them all begun."""
    count, begun = 400 if size < 10 else 60, threading.Event()

    def body(ctx):
        with use_backend(store="file"), ctx.open_group("own", timeout=LIMIT) as group:
            mine = torch.arange(size + group.rank) + 1000 * group.rank
            if group.rank:
                assert begun.wait(LIMIT)

            works = [group.all_gather_list(mine + number, async_op=True) for number in range(count)]
            begun.set()
            for number, work in enumerate(works):
                for rank, taken in enumerate(work.result()):
                    assert torch.equal(taken, torch.arange(size + rank) + 1000 * rank + number), (number, rank)

    run_ranks(body, 2, 2 * LIMIT)


def test_job_that_waits_lets_others_be_done():
    """A callback of a receipt is a user's: it may wait for what only another job can bring."""

    def body(ctx):
        with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
            node = store._session.node
            waited, came = [], threading.Event()

            def waits():
                node.jobs.append(came.set)
                waited.append(store.expect(1 - store.rank, 2).wait(LIMIT)[0].item())

            store.expect(1 - store.rank, 1).add_done_callback(waits)
            store.barrier()
            store.send(torch.tensor(5), 1 - store.rank, 1)
            store.send(torch.tensor(6 + store.rank), 1 - store.rank, 2)
            assert came.wait(LIMIT)
            store.barrier()
            return waited

    assert Background(lambda: run_ranks(body, 2, 2 * LIMIT), "ranks").result(3 * LIMIT) == [[7], [6]]


def test_job_that_waits_keeps_nobody_from_reading():
    """What it waits for comes later: the thread that has read what the job is about must not be the only reader."""

    def body(ctx):
        with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
            waited, began, over = [], threading.Event(), threading.Event()

            def waits():
                began.set()
                waited.append(store.expect(1, 2).wait(LIMIT)[0].item())
                over.set()

            if store.rank == 0:
                store.expect(1, 1).add_done_callback(waits)
                store.send(torch.tensor(0), 1, 0)
                assert began.wait(LIMIT)
                store.send(torch.tensor(0), 1, 0)
                assert over.wait(LIMIT)
            else:
                for tag in (1, 2):
                    store.expect(0, 0).wait(LIMIT)
                    store.send(torch.tensor(4 + tag), 0, tag)

            store.barrier()
            return waited

    assert run_ranks(body, 2, 2 * LIMIT) == [[6], []]


def test_job_may_wait_for_the_work_in_whose_midst_it_came():
    """It is done behind that work's step: under it, it would wait for what its own thread was at."""

    def body(ctx):
        with use_backend(store="file"), ctx.open_group("own", timeout=LIMIT) as group:
            session, waited = group.process_group._store._session, []
            group.barrier()
            node, joint, look_for = session.node, session.joint, session.node.look_for

            def looks(come):
                if not waited:
                    waited.append("at it")
                    (call,) = joint._calls.values()
                    node.jobs.append(lambda: waited.append(joint.wait_for(call, group.rank, LIMIT)))
                    node.after()

                return look_for(come)

            node.look_for = looks
            assert group.all_reduce(torch.ones(3_000_000))[-1].item() == 2
            node.look_for = look_for
            group.barrier()
            return waited

    assert run_ranks(body, 2, 2 * LIMIT) == [["at it", None]] * 2


def test_interrupt_while_looking_leaves_no_job_undone():
    """The message that was missing is handled, and nothing more will come: who waits again finds the call done."""
    over = threading.Event()

    def body(ctx):
        with use_backend(store="file"), ctx.open_group("own", timeout=LIMIT) as group:
            store, tensor = group.process_group._store, torch.ones(1)
            node, here, interrupts = store._session.node, threading.current_thread(), []
            after = node.after

            def interrupted(woken=()):
                if node.jobs and threading.current_thread() is here and not interrupts:
                    interrupts.append(node.jobs)
                    raise KeyboardInterrupt

                after(woken)

            group.barrier()
            if group.rank == 1:
                store.expect(0, 0).wait(LIMIT)  # so that the other one is there first, and looks
                group.process_group.allreduce([tensor]).wait()
                return over.wait(LIMIT / 2)  # and says nothing that would have the other one look up

            node.after, node._watch.looking, node._watch._looks = interrupted, LIMIT, True
            work = group.process_group.allreduce([tensor])
            store.send(torch.tensor(0), 1, 0)
            try:
                work.wait()
            except KeyboardInterrupt:
                work.wait()

            over.set()
            node.after = after
            return tensor.item()

    assert run_ranks(body, 2, 2 * LIMIT) == [2, True]
