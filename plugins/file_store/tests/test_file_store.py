"""The file store: the contract of every store, and what is this one's own."""

import errno
import gc
import itertools
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dtorch_file_store import opening, segments
from dtorch_file_store.calls import Call
from dtorch_file_store.directory import VARIABLE
from dtorch_file_store.link import Link
from dtorch_file_store.tickets import FileTicket
from dtorch_file_store.wire import frame

from dtorch_core import (
    DtorchError,
    KeyInUseError,
    PeerLostError,
    RankFailedError,
    StoreTimeoutError,
    UnsupportedTensorError,
)
from dtorch_core._text import root_cause
from dtorch_core.testing import TensorStoreTests, run_ranks

LIMIT = 20.0

HOMES = "dtorch_file_store.opening.homes_of"


def values(tag, numel=7):
    return torch.arange(numel) + 1000 * (tag + 1)


@pytest.fixture
def node_each(monkeypatch, request):
    """Each rank is a node: whatever it says goes over a socket, though its peer is a thread beside it."""
    skip_processes(request)
    monkeypatch.setattr(HOMES, lambda topology: list(range(len(topology))))


def skip_processes(request):
    if "process" in request.function.__name__:
        pytest.skip("its ranks are processes: nothing that is set in this one reaches them")

    device = request.node.callspec.params.get("device", "cpu") if hasattr(request.node, "callspec") else "cpu"
    if device != "cpu" or "cuda" in getattr(request.function, "capabilities", ()):
        pytest.skip("a process can't map its own memory of a GPU: test_file_cuda.py has a way round that")


class TestOneNode(TensorStoreTests):
    """All ranks are threads of one process."""

    backend = "file"


@pytest.mark.usefixtures("node_each")
class TestNodeEach(TensorStoreTests):
    backend = "file"


class TestTwoRanksPerNode(TensorStoreTests):
    """As ``threads_per_process=2`` would be."""

    backend = "file"

    @pytest.fixture(autouse=True)
    def nodes(self, monkeypatch, request):
        skip_processes(request)
        monkeypatch.setattr(HOMES, lambda topology: [rank // 2 for rank in range(len(topology))])


def on_ranks(body, world_size):
    def rank(ctx):
        with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
            return body(store)

    return run_ranks(rank, world_size, 2 * LIMIT)


def tried(store, key, timeout):
    try:
        return store.dest_get(key, timeout=timeout)
    except StoreTimeoutError:
        return None


@pytest.mark.usefixtures("node_each")
class TestShares:
    """Fewer shares than ranks that want one: exactly so many get one, whoever decides it."""

    @pytest.mark.parametrize("get_count", [1, 2])
    def test_ranks_compete(self, get_count):
        def body(store):
            shares = []
            for number in range(15):
                key, source = f"{number}", number % 4
                if store.rank == source:
                    store.src_set(key, values(number), get_count)
                    store.barrier()
                    store.barrier()
                    store.src_wait_until_get_finished(key)
                    shares.append(0)
                else:
                    shares.append(self.takes(store, key, values(number)))

            return shares

        assert [sum(each) for each in zip(*on_ranks(body, 4), strict=True)] == [get_count] * 15

    def test_producer_competes(self):
        """There is a share for each other rank, which take theirs without asking; then the producer wants one."""

        def body(store):
            shares = []
            for number in range(15):
                if store.rank == number % 3:
                    store.src_set("k", values(number), 2)

                shares.append(self.takes(store, "k", values(number)))
                if store.rank == number % 3:
                    store.src_wait_until_get_finished("k")

                store.barrier()

            return shares

        assert [sum(each) for each in zip(*on_ranks(body, 3), strict=True)] == [2] * 15

    @pytest.mark.parametrize("get_count", [1, 2])
    @pytest.mark.parametrize("first", ["the producer", "the others"])
    def test_producer_leaves(self, first, get_count):
        """Who decides it leaves meanwhile: another node does, and knows who has had one."""
        for number in range(8):
            ready = threading.Barrier(4)

            def body(store, number=number, ready=ready):
                if store.rank == 0:
                    if first == "the producer":
                        store.src_set("k", values(number), get_count)
                        ready.wait(LIMIT)
                    else:
                        ready.wait(LIMIT)
                        store.src_set("k", values(number), get_count)

                    return 0  # and closes it

                ready.wait(LIMIT)
                got = tried(store, "k", 0.1)
                ready.wait(LIMIT)
                got = tried(store, "k", 0.0) if got is None else got
                ready.wait(LIMIT)
                if got is None:
                    return 0

                assert torch.equal(got, values(number))
                store.dest_finish_get("k")
                return 1

            def rank(ctx, body=body, ready=ready):
                with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
                    won = body(store)

                for _ in range(2 if ctx.rank == 0 else 0):
                    ready.wait(LIMIT)

                return won

            assert sum(run_ranks(rank, 4, LIMIT)) == get_count

    @staticmethod
    def takes(store, key, wanted):
        """Whether this rank gets a share, at once or when all have tried."""
        got = tried(store, key, 0.05)
        store.barrier()
        got = tried(store, key, 0.0) if got is None else got
        store.barrier()
        if got is None:
            return 0

        assert torch.equal(got, wanted)
        store.dest_finish_get(key)
        return 1


@pytest.mark.usefixtures("node_each")
class TestKeys:
    def test_key_that_is_free_can_be_set_by_another_rank_at_once(self):
        """That it is free is told with the next message; a rank that needs it asks."""
        free = threading.Barrier(3)

        def body(store):
            for number in range(20):
                source = number % 3
                if store.rank == source:
                    store.src_set("k", values(number), 1)
                    store.src_wait_until_get_finished("k")
                elif store.rank == (source + 1) % 3:
                    assert torch.equal(store.dest_get("k"), values(number))
                    store.dest_finish_get("k")

                free.wait(LIMIT)  # no message: the threads are beside each other

        on_ranks(body, 3)

    def test_key_in_use_is_refused_once_the_producer_has_said_so(self):
        def body(store):
            if store.rank == 0:
                store.src_set("k", values(0), 1)

            store.barrier()
            if store.rank == 1:
                with pytest.raises(KeyInUseError, match="rank 1 can't set it: it is live, set by rank 0"):
                    store.src_set("k", values(1), 1)

                assert torch.equal(store.dest_get("k"), values(0))
                store.dest_finish_get("k")

            if store.rank == 0:
                store.src_wait_until_get_finished("k")

            store.barrier()

        on_ranks(body, 3)

    def test_two_ranks_that_set_one_key_at_once(self):
        """One of them is told, at once or in its wait; a consumer gets one of both tensors, whole."""
        for _ in range(15):
            together = threading.Barrier(2)

            def body(store, together=together):
                if store.rank == 2:
                    got = store.dest_get("k")
                    assert any(torch.equal(got, values(rank)) for rank in range(2))
                    store.dest_finish_get("k")
                    store.barrier()
                    return "got"

                together.wait(LIMIT)
                try:
                    store.src_set("k", values(store.rank), 1)
                    store.barrier()
                    store.src_wait_until_get_finished("k", timeout=0.1)
                except KeyInUseError as error:
                    assert "key 'k'" in str(error)
                    assert "rank 0" in str(error)
                    if "same time" not in str(error):
                        store.barrier()

                    return "refused"
                except (StoreTimeoutError, PeerLostError):  # the consumer had the other one before it was refused
                    return "not taken"

                return "taken"

            *sources, _ = on_ranks(body, 3)
            assert sorted(sources) in (["refused", "taken"], ["not taken", "refused"]), sources

    def test_many_keys_in_flight(self):
        def body(store):
            if store.rank == 0:
                for number in range(5000):
                    store.src_set(f"{number}", values(number), 1)

                for number in range(5000):
                    store.src_wait_until_get_finished(f"{number}")
            else:
                for number in reversed(range(5000)):
                    assert int(store.dest_get(f"{number}")[3]) == 1000 * (number + 1) + 3
                    store.dest_finish_get(f"{number}")

        on_ranks(body, 2)

    def test_many_keys_of_a_rank_that_leaves(self):
        """Its goodbye, which says what is known of each, is larger than what a socket holds."""

        def body(store):
            if store.rank == 0:
                for number in range(5000):
                    store.src_set(f"a key with a long name, which is number {number}", values(number), 2)
            else:
                for number in range(5000):
                    key = f"a key with a long name, which is number {number}"
                    assert int(store.dest_get(key)[3]) == 1000 * (number + 1) + 3
                    store.dest_finish_get(key)

        on_ranks(body, 3)

    def test_reset_again_and_again(self):
        """Nobody waits for the others to have passed it: what is set next is of the next epoch, also where it comes
        before the reset does."""

        def body(store):
            for number in range(60):
                store.src_set(f"{store.rank}", values(number), 2)
                if number % 2:
                    store.src_set("not taken", values(number), 1) if store.rank == number % 3 else None

                for other in {0, 1, 2} - {store.rank}:
                    assert torch.equal(store.dest_get(f"{other}"), values(number))
                    if number % 3:
                        store.dest_finish_get(f"{other}")

                store.reset()

        on_ranks(body, 3)


@pytest.mark.usefixtures("node_each")
class TestWhoIsNamed:
    def test_survivor_that_leaves_is_not_taken_for_the_one_that_was_lost(self):
        """It hears of the death before this node does, which then hears of both at once."""
        stands = threading.Event()

        def body(store):
            session = store._session
            if store.rank == 1:
                threading.Timer(0.05, stands.set).start()
                with pytest.raises(PeerLostError) as raised:
                    store.barrier()

                return str(raised.value)

            assert stands.wait(LIMIT)
            if store.rank == 0:
                with session.node.mutex:
                    session.presence.die(2, "its process ended without a goodbye")
                    woken = session._end()

                session.node.after(woken)
            else:
                with pytest.raises(PeerLostError):
                    store.barrier()

            return ""

        assert "rank 2 (pid" in on_ranks(body, 3)[1]


class TestEmpty:
    @pytest.mark.parametrize("world_size", [1, 2], ids=["memory of one process", "shared memory"])
    @pytest.mark.parametrize(
        ("size", "dtype", "error", "text"),
        [
            ((3,), "float32", TypeError, "dtype must be a torch.dtype, not 'float32'"),
            (3, torch.float32, TypeError, "size must be a sequence of ints"),
            ((2.5,), torch.float32, TypeError, "size must be a sequence of ints"),
            ((-3,), torch.float32, ValueError, "can't be negative"),
            ((1 << 62, 1 << 10), torch.float32, ValueError, "no machine"),
            ((3,), torch.quint8, UnsupportedTensorError, "quantized"),
        ],
    )
    def test_what_is_no_memory_is_refused(self, world_size, size, dtype, error, text, monkeypatch):
        monkeypatch.setattr(HOMES, lambda topology: list(range(len(topology))))

        def body(store):
            with pytest.raises(error, match=text) as raised:
                store.empty(size, dtype=dtype)

            assert str(raised.value).startswith("store 'own', empty: ")

        on_ranks(body, world_size)


@pytest.mark.usefixtures("node_each")
class TestMemory:
    def test_large_tensor(self):
        numel = 8 << 20

        def body(store):
            if store.rank == 0:
                memory = torch.arange(numel, out=store.empty((numel,), dtype=torch.int64))
                store.src_set("k", memory, 1)
                store.src_wait_until_get_finished("k")
            else:
                got = store.dest_get("k")
                assert torch.equal(got, torch.arange(numel))
                store.dest_finish_get("k")

        on_ranks(body, 2)

    def test_no_room_is_an_error_of_src_set_and_the_store_goes_on(self, monkeypatch):
        monkeypatch.setenv("DTORCH_FILE_ARENA_BYTES", str(8 << 20))

        def body(store):
            if store.rank == 0:
                with pytest.raises(DtorchError, match="DTORCH_FILE_ARENA_BYTES"):
                    store.src_set("k", values(0, 4 << 20), 1)

                store.src_set("k", values(1, 1 << 16), 1)
                store.src_wait_until_get_finished("k")
                store.src_set("small", values(2), 1)
                store.src_wait_until_get_finished("small")
            else:
                assert torch.equal(store.dest_get("k"), values(1, 1 << 16))
                store.dest_finish_get("k")
                assert torch.equal(store.dest_get("small"), values(2))
                store.dest_finish_get("small")

        on_ranks(body, 2)

    def test_borrowed_tensor_outlives_the_store(self):
        """Who keeps it against the rules reads memory that is still there, whatever is in it."""

        def rank(ctx):
            with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
                if store.rank == 0:
                    store.src_set("k", values(0, 1 << 16), 1)
                    store.src_wait_until_get_finished("k")
                    store.barrier()
                    return None

                got = store.dest_get("k")
                store.dest_finish_get("k")
                store.barrier()

            return int(got.sum()) is not None

        assert run_ranks(rank, 2, LIMIT) == [None, True]


@pytest.mark.usefixtures("node_each")
class TestOpening:
    def test_opening_ends_on_every_rank_if_one_cannot_take_part(self, monkeypatch):
        """At once, and with its reason, whether they wait for its word or for its connection."""
        connect = opening._Meeting._connect

        def without_room(meeting, node, word):
            if meeting._index == 2 and node == 1 and b"no room" not in word:
                raise OSError("no room")

            return connect(meeting, node, word)

        monkeypatch.setattr(opening._Meeting, "_connect", without_room)

        def rank(ctx):
            begun = time.monotonic()
            with pytest.raises((DtorchError, OSError), match="no room"):
                ctx.open_store("own", backend="file", timeout=LIMIT)

            return time.monotonic() - begun

        assert max(run_ranks(rank, 4, 2 * LIMIT)) < LIMIT / 2


    @pytest.mark.parametrize("number", [0, 1], ids=["to listen", "to connect"])
    def test_rank_that_has_no_descriptor_left(self, monkeypatch, number):
        """The others learn it at once, with the reason and the way out."""
        real, calls = socket.socket, itertools.count()

        def make(*given, **named):
            if threading.current_thread().name == "rank 1" and next(calls) == number:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            return real(*given, **named)

        def rank(ctx):
            begun = time.monotonic()
            with pytest.raises(DtorchError, match="rank 1.*Too many open files.*ulimit -n"):
                ctx.open_store("own", backend="file", timeout=LIMIT)

            return time.monotonic() - begun

        monkeypatch.setattr(socket, "socket", make)
        assert max(run_ranks(rank, 3, 2 * LIMIT)) < LIMIT / 2


@pytest.mark.usefixtures("node_each")
class TestNoRoomToMap:
    """A consumer can't map what a peer has published. Its share stays its own."""

    @pytest.mark.parametrize("again", [True, False])
    def test_get_can_be_repeated_or_given_up(self, monkeypatch, again):
        real, calls = segments._map, itertools.count()

        def refuse(fd, size):
            if threading.current_thread().name == "rank 1" and next(calls) == 0:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

            return real(fd, size)

        def rank(ctx):
            with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
                if store.rank == 0:
                    store.src_set("k", values(3, 1 << 16), 1)
                    store.src_wait_until_get_finished("k")
                    return

                with pytest.raises(DtorchError, match="can't be mapped: Cannot allocate memory"):
                    store.dest_get("k")

                if again:
                    assert torch.equal(store.dest_get("k"), values(3, 1 << 16))

                store.dest_finish_get("k")

        monkeypatch.setattr(segments, "_map", refuse)
        run_ranks(rank, 2, LIMIT)


def held():
    """Open files, mappings of shared memory, threads, and resident bytes."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:dtorch"), threading.active_count(), resident


@pytest.mark.usefixtures("node_each")
class TestSessions:
    @pytest.fixture
    def folder(self, monkeypatch):
        """For sessions, and a short one: the paths of sockets are."""
        with tempfile.TemporaryDirectory() as folder:
            monkeypatch.setenv(VARIABLE, folder)
            yield folder

    def test_many_one_after_another_leave_nothing(self, folder):
        count = int(os.environ.get("DTORCH_TEST_SESSIONS", "60"))

        def rank(ctx):
            for number in range(count):
                with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
                    if store.rank == 0:
                        store.src_set("k", values(number, 1 << 15), 1)
                        store.src_wait_until_get_finished("k")
                    else:
                        assert torch.equal(store.dest_get("k"), values(number, 1 << 15))
                        store.dest_finish_get("k")

        count, wanted = 3, count
        run_ranks(rank, 2, LIMIT)
        count, before = wanted, held()
        run_ranks(rank, 2, LIMIT + wanted)
        after = held()
        assert after[:3] == before[:3]
        assert after[3] - before[3] < 32 << 20
        assert os.listdir(folder) == []

    def test_many_open_files_do_not_matter(self):
        """What has a number above 1023 is nothing to ``select()``."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < 2000:
            pytest.skip(f"this process may have {hard} files open")

        files = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
            files += [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

            def body(store):
                store.barrier()

            on_ranks(body, 3)
        finally:
            for file in files:
                os.close(file)

            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_other_user_is_refused(self, monkeypatch):
        def getsockopt(self, level, option, *size):
            if option == socket.SO_PEERCRED:
                return struct.pack("3i", os.getpid(), os.getuid() + 1, 0)

            return super(socket.socket, self).getsockopt(level, option, *size)

        monkeypatch.setattr(socket.socket, "getsockopt", getsockopt)

        def rank(ctx):
            with pytest.raises((DtorchError, StoreTimeoutError)) as caught:
                ctx.open_store("own", backend="file", timeout=1.0)

            return str(caught.value)

        said = run_ranks(rank, 2, LIMIT)
        assert f"of user {os.getuid() + 1}, not pid {os.getpid()} of user {os.getuid()}" in said[1]

    def test_goodbye_of_one_rank_is_no_end_for_its_node(self, monkeypatch):
        monkeypatch.setattr(HOMES, lambda topology: [0, 0, 1, 1])

        def rank(ctx):
            with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
                if store.rank in (0, 2):
                    return

                if store.rank == 1:
                    store.src_set("k", values(0), 1)
                    store.src_wait_until_get_finished("k")
                else:
                    assert torch.equal(store.dest_get("k"), values(0))
                    store.dest_finish_get("k")
                    with pytest.raises(PeerLostError, match="rank"):
                        store.dest_get("never")

        run_ranks(rank, 4, LIMIT)

    def test_rank_that_raises_is_named_to_those_on_other_nodes(self):
        seen = []

        def rank(ctx):
            store = ctx.open_store("own", backend="file", timeout=LIMIT)
            if ctx.rank == 1:
                store.barrier()
                raise KeyError("on purpose")

            store.barrier()
            try:
                store.dest_get("never")
            except PeerLostError as error:
                seen.append(str(error))
                raise

        with pytest.raises(RankFailedError, match="on purpose"):
            run_ranks(rank, 3, LIMIT)

        assert len(seen) == 2
        assert all("rank 1" in said for said in seen)


class TestLink:
    def test_descriptor_that_can_not_be_taken_is_lost_alone(self):
        """Those that come later are still with their own messages."""
        here, there = socket.socketpair()
        sender, receiver = Link(here, 1), Link(there, 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        sent = [os.memfd_create(f"fd {number}") for number in range(3)]
        got = []
        try:
            for number, fd in enumerate(sent):
                for name, given in (("before", None), ("with", fd)):
                    sender.queue(frame(name, number), given)

            assert sender.flush()
            while len(got) < len(sent):
                if not got:  # the next one to be made would have the first number that is free
                    os.close(lowest := os.dup(0))
                    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))

                try:
                    messages = receiver.receive()
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

                got += [receiver.take_fd() for message in messages if message.kind == "with"]

            assert got[0] == -1
            assert [os.readlink(f"/proc/self/fd/{fd}").split()[1] for fd in got[1:]] == ["1", "2"]
        finally:
            for fd in (*sent, *got[1:]):
                os.close(fd)

            sender.close()
            receiver.close()

    def test_peer_that_does_not_read_costs_little(self):
        """What is queued for it is not copied again with each message that follows."""
        here, there = socket.socketpair()
        link = Link(here, 1)
        message = frame("set", body=bytes(16_000))
        begun = time.process_time()
        with there:
            for _ in range(2000):
                link.queue(message)
                assert link.flush() in (True, False)

            took = time.process_time() - begun
            link.close()

        assert took < 0.5


class TestMeeting:
    """What a node tells the others is the first cause of its error: that has to be the death which it has seen."""

    @pytest.fixture
    def meeting(self, tmp_path):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait(20)
        meeting = opening._Meeting.__new__(opening._Meeting)
        member = SimpleNamespace(rank=1, pid=ended.pid)
        meeting._homes, meeting._pids, meeting._hello = [0, 1], [os.getpid(), ended.pid], b""
        meeting._deadline = time.monotonic() + LIMIT
        meeting._directory = SimpleNamespace(socket_path=lambda node: str(tmp_path / f"{node}"))
        meeting._ctx = SimpleNamespace(label="open_store('m')", topology=[None, member], failure=lambda seconds: None)
        return meeting

    @pytest.mark.parametrize("step", [lambda meeting: meeting._pidfd(1), lambda meeting: meeting._connect(1, b"word")])
    def test_a_process_that_has_ended(self, meeting, step):
        with pytest.raises(PeerLostError, match=r"rank 1 \(pid \d+\) ended while it was opened") as raised:
            step(meeting)

        assert root_cause(raised.value) is raised.value


class TestTicketWithEarlier:
    """A barrier's."""

    @pytest.mark.parametrize("fails", [True, False])
    def test_one_that_failed_is_done_while_earlier_ones_go_on(self, fails):
        earlier, call = Call("earlier", 1), Call("barrier", 1)
        earlier.offers, earlier.came, call.finished = [object()], 1, True
        call.error = PeerLostError("rank 1 was lost") if fails else None
        joint = SimpleNamespace(unfinished=lambda rank: [earlier], done=lambda call, rank: call.finished)
        ticket = FileTicket(joint, call, 0, -1).with_earlier()
        assert ticket.done() == fails
        earlier.finished = True
        assert ticket.done()
