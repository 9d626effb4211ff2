"""Work: what is under way, and what is over, whichever thread hears of it first."""

import subprocess
import sys
import threading

import pytest

from dtorch_core import PeerLostError
from dtorch_core._groups.foreign_work import ForeignWork
from dtorch_core._groups.notes import Notes
from dtorch_core._groups.work import Work
from dtorch_core.joint import Ticket

LIMIT = 10.0


class FailedTicket(Ticket):
    """Ranks that wait for it have heard that it failed; its callback's thread has not."""

    callback = None

    def wait(self, timeout, stream=None):
        raise PeerLostError("rank 1 was lost")

    def notes(self):
        raise AssertionError("it failed")

    def done(self):
        return True

    def add_done_callback(self, callback):
        self.callback = callback


@pytest.fixture
def ticket():
    return FailedTicket()


@pytest.fixture
def work(ticket):
    def start(texts):
        ticket.wait(0)

    return Work("gather()", Notes(ticket, threading.Lock()), start, LIMIT, "cpu")


def test_who_has_heard_the_error_finds_the_work_over(work):
    assert not work.is_completed()
    with pytest.raises(PeerLostError):
        work.wait()

    assert work.is_completed()
    assert isinstance(work.exception(), PeerLostError)


def test_so_does_who_has_heard_it_from_the_future(work, ticket):
    called = threading.Event()
    future = work.get_future()
    future.add_done_callback(lambda _: called.set())
    assert called.wait(LIMIT)
    assert work.is_completed()
    ticket.callback()
    assert isinstance(work.exception(), PeerLostError)
    with pytest.raises(PeerLostError, match="rank 1"):
        future.wait()


def test_future_fails_where_the_works_own_can_not_be_had():
    class Without:
        def get_future(self):
            raise RuntimeError("getFuture not implemented")

    class LateTicket(FailedTicket):
        over = threading.Event()

        def wait(self, timeout, stream=None):
            assert self.over.wait(timeout)

        def notes(self):
            return ["same\ncall\ntext"]

    ticket = LateTicket()
    work = Work("gather()", Notes(ticket, threading.Lock()), lambda _: (Without(), lambda: None), LIMIT, "cpu")
    called = threading.Event()
    future = work.get_future()
    future.add_done_callback(lambda _: called.set())
    ticket.over.set()
    ticket.callback()
    assert called.wait(LIMIT)
    with pytest.raises(RuntimeError, match="getFuture not implemented"):
        future.wait()


def test_future_of_a_scatter_or_gather_of_another_rank_fails_as_its_work_does():
    """Whoever asks for it may be a thread of its own, out of which an error would reach nobody."""

    class Aborted:
        def wait(self):
            raise RuntimeError("NCCL communicator was aborted")

    future = ForeignWork(Aborted(), LIMIT, True, one_sided=()).get_future()
    assert future.done()
    with pytest.raises(RuntimeError, match="was aborted"):
        future.wait()


@pytest.mark.parametrize("last", ["all_reduce(torch.ones(3)", "all_gather_list(torch.ones(2 + ctx.rank)"])
def test_future_may_be_the_last_that_a_program_waits_for(last):
    """Its callback is under way, in a thread that was begun for it, when the interpreter ends."""
    program = f"""
import sys, threading, time, torch, dtorch_core

asked = threading.Event()

def slow(future):
    time.sleep(1)
    torch.ones(2).add_(1)
    sys.stdout.write("ended\\n")

def body(ctx):
    with ctx.open_group("last", timeout={LIMIT}) as group:
        assert ctx.rank == 0 or asked.wait({LIMIT})
        work = group.{last}, async_op=True)
        if ctx.rank == 0:
            future = work.get_future()
            future.add_done_callback(slow)
            del work
            asked.set()
            future.wait()

dtorch_core.spawn(body, 2)
"""
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=6 * LIMIT)
    assert (ran.returncode, ran.stdout) == (0, "ended\n"), ran.stderr
