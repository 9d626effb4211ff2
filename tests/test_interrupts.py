"""Ctrl-C, or another signal whose handler raises, in a blocking call: peers are woken, and the tensors are let go."""

import pkgutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtorch_core import AbortedError, open_group, open_store, use_backend
from dtorch_core._meeting.meeting import Meeting
from dtorch_core.testing import Background, asleep

pytest.importorskip("dtorch_file_store")
pytest.importorskip("dtorch_memory_store")
pytest.importorskip("dtorch_samedevice_group")

LIMIT = 20.0
LARGE = 3_000_000
TOLD = r"rank 0 was interrupted in "


class Stop(Exception):
    """What a handler of the caller's raises."""


@pytest.fixture(params=["memory", "file"])
def store(request, monkeypatch):
    """Over files each rank is a node of its own: whatever it says goes over a socket."""
    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))
    with use_backend(store=request.param):
        yield request.param


@pytest.fixture(params=[KeyboardInterrupt, Stop])
def interrupt(request):
    def stop(number, frame):
        raise request.param

    before = signal.signal(signal.SIGUSR1, stop)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


WAITS = (
    "dtorch_core._meeting.meeting.interruptibly",
    "dtorch_memory_store.joint.MemoryTicket.wait",
    "dtorch_memory_store.mail.MemoryReceipt.wait",
    "dtorch_file_store.tickets.FileTicket.wait",
    "dtorch_file_store.letters.FileReceipt.wait",
)
waits = threading.Event()
"""The main thread has come to where it waits."""


@pytest.fixture(autouse=True)
def says_when_it_waits(monkeypatch):
    def saying(wait):
        def says(*args, **named):
            if threading.current_thread() is threading.main_thread():
                waits.set()

            return wait(*args, **named)

        return says

    for name in WAITS:
        monkeypatch.setattr(name, saying(pkgutil.resolve_name(name)))


def interrupted():
    """In a moment, when it waits, the main thread gets a signal."""
    waits.clear()
    return Background(lambda: waits.wait(LIMIT) and signalled(), "interrupts")


def signalled():
    """The main thread, which waits, gets a signal."""
    main = threading.main_thread()
    asleep(SimpleNamespace(thread=main))
    signal.pthread_kill(main.ident, signal.SIGUSR1)


def with_peers(body, *others, world_size=2):
    """``body(group)`` here, as rank 0, and ``others`` as the ranks after it."""

    def opened(rank):
        return open_group("interrupts", rank=rank, world_size=world_size, timeout=LIMIT)

    def peer(rank, run):
        with opened(rank) as group:
            return run(group)

    peers = [Background(lambda rank=rank, run=run: peer(rank, run)) for rank, run in enumerate(others, 1)]
    group = opened(0)
    try:
        body(group)
    finally:
        found = [peer.result(LIMIT) for peer in peers]
        group.close()

    return found


def blocking(group, x):
    """c10d's call whose caller waits at once, as ``dist.all_reduce`` makes it."""
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    return group.process_group.allreduce([x], options)


CALLS = {
    "all_reduce": lambda group, x: group.all_reduce(x, out=x),
    "all_gather": lambda group, x: group.all_gather(x),
    "barrier": lambda group, x: group.barrier(),
    "split": lambda group, x: group.split([0, 1, 2]),
    "c10d": lambda group, x: blocking(group, x).wait(),
    "c10d again": lambda group, x: [blocking(group, y).wait() for y in (torch.ones(2), x)],
}


@pytest.mark.parametrize("call", CALLS)
def test_peers_of_an_interrupted_call_are_woken(store, interrupt, call):
    """One waits in it, another one comes later."""
    late = threading.Event()

    def waits(group):
        with pytest.raises(AbortedError, match=TOLD) as told:
            CALLS[call](group, torch.ones(2))

        return str(told.value)

    def comes_late(group):
        if call == "c10d again":
            blocking(group, torch.ones(2)).wait()

        assert late.wait(LIMIT)
        return waits(group)

    def body(group):
        x = torch.ones(2)
        try:
            with pytest.raises(interrupt):
                interrupted()
                CALLS[call](group, x)

            x.fill_(100)
            with pytest.raises(AbortedError, match=TOLD):
                group.barrier()
        finally:
            late.set()

        kept.append(x)

    kept = []
    for text in with_peers(body, waits, comes_late, world_size=3):
        assert text.endswith(interrupt.__name__)
        assert call.partition(" ")[0] in text or call in ("c10d", "c10d again")

    assert kept[0].tolist() == [100, 100]


def test_wait_of_an_async_work_can_be_repeated(store, interrupt):
    come = threading.Event()

    def late(group):
        assert come.wait(LIMIT)
        x = torch.ones(2)
        group.process_group.allreduce([x]).wait()
        return x.tolist() + group.all_reduce(torch.ones(1)).tolist()

    def body(group):
        x = torch.ones(2)
        c10d_work = group.process_group.allreduce([x])
        work = group.all_reduce(torch.ones(1), async_op=True)
        for wait in (c10d_work.wait, work.wait):
            with pytest.raises(interrupt):
                interrupted()
                wait()

        come.set()
        c10d_work.wait()
        assert x.tolist() + work.result().tolist() == [2, 2, 2]

    assert with_peers(body, late) == [[2, 2, 2]]


def test_interrupted_receive_takes_no_message(store, interrupt):
    ready = threading.Event()

    def sends(group):
        assert ready.wait(LIMIT)
        for number in range(2):
            group.send(torch.arange(3) + number, 0)

        group.barrier()

    def body(group):
        for receive in (lambda: group.recv(1), lambda: group.recv(1, out=torch.ones(3, dtype=torch.int64))):
            with pytest.raises(interrupt):
                interrupted()
                receive()

        ready.set()
        assert [group.recv(1).tolist() for _ in range(2)] == [[0, 1, 2], [1, 2, 3]]
        group.barrier()

    with_peers(body, sends)


def test_interrupted_rank_waits_for_what_is_done_with_its_tensors(interrupt, monkeypatch):
    """All have come, and another rank is at the work: the call goes well there, and is over when this one raises."""
    posted, at_it, go_on, raised = (threading.Event() for _ in range(4))
    joint = pytest.importorskip("dtorch_memory_store.joint").Joint
    post, start = joint.post, joint._start

    def posts(self, *offered):
        ticket = post(self, *offered)
        posted.set()
        return ticket

    def slow(self, call, rank, *rest):
        if rank == 1:
            at_it.set()
            assert go_on.wait(LIMIT)

        return start(self, call, rank, *rest)

    monkeypatch.setattr(joint, "post", posts)
    monkeypatch.setattr(joint, "_start", slow)

    def last(group):
        assert posted.wait(LIMIT)
        return group.all_reduce(torch.ones(2)).tolist()

    def drive():
        assert at_it.wait(LIMIT) and waits.wait(LIMIT)
        signalled()
        asleep(SimpleNamespace(thread=threading.main_thread()))
        early = raised.is_set()
        go_on.set()
        return early

    def body(group):
        x = torch.ones(2)
        with pytest.raises(interrupt):
            waits.clear()
            driver = Background(drive)
            group.all_reduce(x, out=x)

        raised.set()
        assert not driver.result(LIMIT)
        assert x.tolist() == [2, 2]
        x.fill_(100)

    with use_backend(store="memory"):
        assert with_peers(body, last) == [[2, 2]]


def test_call_that_halts_does_not_go_on_once_its_rank_was_interrupted(interrupt, monkeypatch):
    """Between processes large tensors go step by step, and a rank may be slow amid them."""
    monkeypatch.setattr("dtorch_file_store.opening.homes_of", lambda topology: list(range(len(topology))))
    raised, halted = threading.Event(), threading.Event()

    def slow(group):
        arena = group.process_group._store._session.arena
        allocate = arena.allocate

        def late(nbytes):
            assert raised.wait(LIMIT)
            return allocate(nbytes)

        arena.allocate = late
        with pytest.raises(AbortedError, match=TOLD):
            group.all_reduce(torch.ones(LARGE))

    def body(group):
        session = group.process_group._store._session
        progress = session.joint._progress
        give_up = progress.give_up
        progress.give_up = lambda: [*give_up(), *(halted.set() or ())]  # called where a part halts
        x = torch.ones(LARGE)
        with pytest.raises(interrupt):
            Background(lambda: halted.wait(LIMIT) and signalled())
            group.all_reduce(x, out=x)

        x.fill_(100)
        raised.set()
        kept.append((x, session.joint))

    kept = []
    with use_backend(store="file"):
        with_peers(body, slow)

    x, joint = kept[0]
    assert x.eq(100).all()
    assert not joint._calls


@pytest.mark.parametrize("tasks", [0, 1, 3])
def test_interrupt_of_who_does_the_work_is_its_own(tasks):
    """The others hear of it, and raise no KeyboardInterrupt."""
    posted, taken = threading.Event(), threading.Event()

    def fail():
        if threading.current_thread() is not threading.main_thread():
            assert taken.wait(LIMIT)
            return

        taken.set()
        raise KeyboardInterrupt

    def work(offers):
        if not tasks:
            fail()

        return [fail] * tasks

    def body(group):
        assert posted.wait(LIMIT)
        with pytest.raises(KeyboardInterrupt):
            group.process_group._store.post("k", "a call", (), work).wait(LIMIT)

        group.barrier()  # only this call is over

    def peer(group):
        ticket = group.process_group._store.post("k", "a call", (), work)
        posted.set()
        with pytest.raises(AbortedError, match=r"rank 0 was interrupted in k, a call: KeyboardInterrupt"):
            ticket.wait(LIMIT)

        group.barrier()

    with use_backend(store="memory"):
        with_peers(body, peer)


@pytest.fixture(params=["in process", "file", "tcp"])
def rendezvous(request, tmp_path):
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    return f"file://{tmp_path}/meeting" if request.param == "file" else None


def test_interrupted_opening(rendezvous, interrupt):
    """It is over at once, also for a rank that waits in it, and the name can be opened anew."""

    def opened(rank, world_size):
        return open_store("opening", rank=rank, world_size=world_size, rendezvous=rendezvous, timeout=LIMIT)

    waiting = Background(lambda: opened(1, 3))
    asleep(waiting)
    began = time.monotonic()
    with pytest.raises(interrupt):
        interrupted()
        opened(0, 3)

    with pytest.raises(AbortedError, match=r"rank 0 (was interrupted while it was opened|failed)"):
        waiting.result(LIMIT)

    assert time.monotonic() - began < LIMIT / 2
    peer = Background(lambda: opened(1, 2).close())
    opened(0, 2).close()
    peer.result(LIMIT)


def test_opening_that_is_interrupted_before_it_waits(monkeypatch):
    """The rank is counted already, so that another one would wait for it."""
    add = Meeting._join

    def join(self):
        add(self)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    monkeypatch.setattr(Meeting, "_join", join)
    waiting = Background(lambda: open_store("opening", rank=1, world_size=2, timeout=LIMIT))
    asleep(waiting)
    with pytest.raises(KeyboardInterrupt):
        open_store("opening", rank=0, world_size=2, timeout=LIMIT)

    with pytest.raises(AbortedError, match="rank 0 was interrupted while it was opened"):
        waiting.result(LIMIT)
