"""Ranks open a name together: they meet, agree and build; whatever happens to one of them ends alike for all."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtorch_core import (
    AbortedError,
    DtorchError,
    NoBackendError,
    PeerLostError,
    PluginError,
    ProtocolError,
    RankFailedError,
    StoreTimeoutError,
    _board,
    open_group,
    open_store,
    refresh,
    spawn,
)
from dtorch_core import _rendezvous as rendezvous
from dtorch_core._board import Lines
from dtorch_core._registry import registry
from dtorch_core.testing import Background

LONG = 60.0
"""A timeout that no test reaches: what ends before was woken."""

PROMPT = 10.0
"""Seconds within which a rank is woken, on a busy machine. (c10d asks a name server about each peer of a TCPStore, and
where none answers that takes five seconds.)"""

SHORT = 0.3
"""A timeout to be reached."""


@pytest.fixture
def fake(site):
    """A store backend that fits everything. ``behave[rank]``, where set, is called by its factory with the context."""
    behaviour = """
    behave = {}

    def make(ctx):
        if "/" not in ctx.name and ctx.rank in behave:
            behave[ctx.rank](ctx)

        return Store(ctx)
    """
    module = site.module(site.STORE + textwrap.dedent(behaviour))
    site.backend("fake-dist", "fake", factory=f"{module}:make", plugin="fake")
    refresh()
    return importlib.import_module(module)


class Ranks:
    """Calls in one thread each; what each returned or raised, and how long all took."""

    def __init__(self, calls):
        self.outcomes = [None] * len(calls)
        self._started = time.monotonic()
        self._threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _run(self, i, call):
        try:
            self.outcomes[i] = call()
        except BaseException as error:
            self.outcomes[i] = error

    def join(self, timeout=30.0):
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a rank hangs"

        self.seconds = time.monotonic() - self._started
        return self.outcomes


def opened(count, name="x", **each):
    """Open ``name`` on raw threads. An argument that is a function is called with the rank."""

    def call(rank):
        given = {"world_size": count, "timeout": LONG, **each}
        given = {key: value(rank) if callable(value) else value for key, value in given.items()}
        return lambda: open_store(name, rank=rank, **given)

    return Ranks([call(rank) for rank in range(count)])


def raised(outcomes, kind):
    """The messages of errors that are all of this kind."""
    for outcome in outcomes:
        assert isinstance(outcome, kind), repr(outcome)

    return [str(outcome) for outcome in outcomes]


def free_port():
    # Bound with SO_REUSEADDR and closed: free, and not handed out again soon.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class TestInProcess:
    @pytest.mark.parametrize("count", [2, 3, 4])
    def test_threads_meet_by_name(self, fake, count):
        stores = opened(count).join()
        assert [store.rank for store in stores] == list(range(count))
        assert {store.backend for store in stores} == {"fake"}
        for store in stores:
            assert store.world_size == count
            assert [member.rank for member in store.topology] == list(range(count))
            assert store.topology == stores[0].topology
            assert store.topology.same_process and store.topology.same_device

        assert len({member.thread for member in stores[0].topology}) == count
        assert {member.pid for member in stores[0].topology} == {os.getpid()}

    def test_world_size_1_meets_nobody(self, fake):
        """The same name in several threads at once is a store of each one's own."""
        calls = [lambda: open_store("x", rank=0, world_size=1, timeout=LONG)] * 8
        assert [store.backend for store in Ranks(calls).join()] == ["fake"] * 8

    def test_names_at_once_are_apart(self, fake):
        ranks = [opened(2, name) for name in ("a", "b", "a/b", "b/a")]
        for names in ranks:
            one, two = names.join()
            assert one.name == two.name

    def test_names_are_any_text(self, fake):
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        names = ["a/b", "..", " ", "\0", "\n", "\ud800", "\u00e4" * 5000, "x" * 100_000, "x" * 100_001]
        held = [opened(2, name, rendezvous=server).join() for name in names]
        assert [[store.name for store in stores] for stores in held] == [[name, name] for name in names]
        held[-1][0].context.rendezvous.set("address", "of the last")
        assert not held[-2][1].context.rendezvous.check(["address"])

    def test_name_is_opened_many_times(self, fake):
        def call(rank):
            def run():
                for _ in range(50):
                    open_store("again", rank=rank, world_size=3, timeout=LONG).close()

            return run

        keys = rendezvous._in_process.num_keys()
        assert Ranks([call(rank) for rank in range(3)]).join() == [None] * 3
        # What stays of a name is how often it was opened.
        assert rendezvous._in_process.num_keys() <= keys + 1

    def test_name_is_opened_again_while_it_is_open(self, fake):
        first, second = opened(2).join(), opened(2).join()
        first[0].context.rendezvous.set("address", "of the first")
        assert first[1].context.rendezvous.get("address") == b"of the first"
        assert not second[1].context.rendezvous.check(["address"])

    def test_missing_rank_costs_the_timeout_and_is_named(self, fake):
        ranks = Ranks([lambda r=r: open_store("x", rank=r, world_size=4, timeout=SHORT) for r in (0, 2)])
        for text in raised(ranks.join(), StoreTimeoutError):
            assert "gave up after 0.3 s: rank 1, rank 3 had not come" in text
            assert "open_store('x')" in text

        assert SHORT <= ranks.seconds < SHORT + PROMPT

    def test_shortest_timeout_ends_it_for_all(self, fake):
        timeouts = {0: LONG, 1: SHORT, 2: LONG}
        ranks = Ranks([lambda r=r: open_store("x", rank=r, world_size=4, timeout=timeouts[r]) for r in timeouts])
        for text in raised(ranks.join(), StoreTimeoutError):
            assert "rank 1 gave up after 0.3 s: rank 3 had not come" in text

        assert ranks.seconds < PROMPT

    def test_late_rank_meets_those_who_try_again(self, fake):
        def persistent():
            for attempt in range(100):
                try:
                    return attempt, open_store("x", rank=0, world_size=2, timeout=0.1)
                except StoreTimeoutError:
                    late.set()

            raise AssertionError("rank 1 never came")

        late = threading.Event()
        ranks = Ranks([persistent, lambda: late.wait(10) and open_store("x", rank=1, world_size=2, timeout=LONG)])
        (attempt, first), second = ranks.join()
        assert attempt >= 1
        assert first.topology == second.topology

    def test_late_rank_alone_costs_its_own_timeout(self, fake):
        for rank in (0, 1):
            (outcome,) = Ranks([lambda r=rank: open_store("x", rank=r, world_size=2, timeout=SHORT)]).join()
            assert f"rank {1 - rank} had not come" in str(outcome)

    def test_two_callers_of_one_rank(self, fake):
        """The second one is told; the opening goes on without it."""
        first = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=LONG)])
        number = rendezvous._in_process.add("dtorch/store/x/openings", 0)
        rendezvous._in_process.wait([f"dtorch/store/x/{number}/here/0"], timedelta(seconds=LONG))
        (twice,) = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=LONG)]).join()
        assert "two callers say that they are rank 0" in raised([twice], ProtocolError)[0]
        (peer,) = Ranks([lambda: open_store("x", rank=1, world_size=2, timeout=LONG)]).join()
        assert first.join()[0].topology == peer.topology

    @pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
    def test_different_world_sizes(self, fake, order):
        """Rank 2 says 4. Whoever comes first, all three learn of it."""
        ranks = []
        for rank in order:
            size = 4 if rank == 2 else 3
            ranks.append(Ranks([lambda r=rank, n=size: open_store("x", rank=r, world_size=n, timeout=LONG)]))
            number = rendezvous._in_process.add("dtorch/store/x/openings", 0)
            if rank != order[-1]:
                key = f"dtorch/store/x/{number}/members/{rank}"
                rendezvous._in_process.wait([key], timedelta(seconds=LONG))

        for (text,) in [raised(one.join(), ProtocolError) for one in ranks]:
            assert "do not say the same world_size: rank 0 says 3, rank 1 says 3, rank 2 says 4" in text

        assert max(one.seconds for one in ranks) < PROMPT

    def test_rank_of_a_smaller_world(self, fake):
        ranks = opened(3, world_size=lambda rank: 2 if rank == 0 else 3, timeout=2 * SHORT)
        raised(ranks.join(), (ProtocolError, StoreTimeoutError))
        assert any(isinstance(outcome, ProtocolError) for outcome in ranks.outcomes)

    @pytest.mark.parametrize(
        ("wrong", "error", "said"),
        [
            ({"name": ""}, ValueError, "name must be a non-empty string"),
            ({"name": 3}, ValueError, "name must be a non-empty string"),
            ({"rank": 2}, ValueError, r"rank 2 is not one of 2 ranks \(0 to 1\)"),
            ({"rank": -1}, ValueError, "rank -1 is not one of 2 ranks"),
            ({"rank": True}, TypeError, "rank must be an int, not True"),
            ({"world_size": 0}, ValueError, "world_size must be at least 1, not 0"),
            ({"rank": 1, "world_size": 1}, ValueError, r"rank 1 is not one of 1 rank \(0 to 0\)"),
            ({"world_size": 2.0}, TypeError, "world_size must be an int"),
            ({"timeout": 0}, ValueError, "timeout must be a positive number of seconds, not 0"),
            ({"timeout": float("inf")}, ValueError, "timeout must be a positive number"),
            ({"timeout": float("nan")}, ValueError, "timeout must be a positive number"),
            ({"timeout": "5"}, ValueError, "timeout must be a positive number"),
            ({"rendezvous": 7}, TypeError, "rendezvous must be a torch.distributed.Store, a URL or None, not 7"),
        ],
    )
    def test_wrong_argument(self, fake, wrong, error, said):
        given = {"name": "x", "rank": 0, "world_size": 2, "timeout": SHORT, **wrong}
        with pytest.raises(error, match=said):
            open_store(given.pop("name"), **given)


class TestCarriers:
    """The same over every kind of c10d Store, given as one object to all threads or as a URL."""

    CARRIERS = ["HashStore", "FileStore", "TCPStore", "PrefixStore", "file://", "tcp://", "env://"]

    @pytest.fixture(params=CARRIERS)
    def carrier(self, request, site, tmp_path):
        if request.param in ("TCPStore", "PrefixStore"):
            server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            return server if request.param == "TCPStore" else dist.PrefixStore("mine/", server)

        if request.param == "env://":
            site.env("MASTER_ADDR", "127.0.0.1")
            site.env("MASTER_PORT", str(free_port()))
            return "env://"

        makers = {
            "HashStore": dist.HashStore,
            "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), -1),
            "file://": lambda: f"file://{tmp_path}/url",
            "tcp://": lambda: f"tcp://127.0.0.1:{free_port()}",
        }
        return makers[request.param]()

    def test_ranks_meet_again_and_again(self, fake, carrier):
        for _ in range(3):
            stores = opened(3, rendezvous=carrier).join()
            assert [store.rank for store in stores] == [0, 1, 2]

    def test_names_at_once_in_opposite_order(self, fake, carrier):
        """A rank that waits for one name does not hold up its other names on the same connection."""

        def call(rank, name):
            return lambda: open_store(name, rank=rank, world_size=2, timeout=LONG, rendezvous=carrier).close()

        def both(rank, names):
            return lambda: [call(rank, name)() for name in names]

        assert Ranks([call(0, "a"), call(0, "b"), both(1, "ba")]).join() == [None, None, [None, None]]

    def test_missing_rank(self, fake, carrier):
        opened(2, rendezvous=carrier).join()  # whatever has to be connected, or looked up, is
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=carrier)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "rank 0 gave up after 0.3 s: rank 1 had not come" in text
        assert ranks.seconds < SHORT + PROMPT

    def test_failing_rank_wakes_its_peers(self, fake, carrier):
        fake.behave[1] = lambda ctx: 1 / 0
        ranks = opened(3, rendezvous=carrier)
        outcomes = ranks.join()
        raised(outcomes[1:2], ZeroDivisionError)
        for text in raised([outcomes[0], outcomes[2]], AbortedError):
            assert "rank 1 failed: ZeroDivisionError" in text

    def test_spawned_rank_that_fails_wakes_an_opening(self, fake, carrier):
        def run(ctx):
            if ctx.rank == 0:
                open_store("x", rank=0, world_size=2, timeout=LONG, rendezvous=carrier)
            else:
                time.sleep(SHORT)
                raise ValueError("before it opened")

        started = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 1 of 2 failed with ValueError: before it opened") as caught:
            spawn(run, 2)

        assert "left behind" not in str(caught.value)
        assert time.monotonic() - started < 2 * PROMPT


class Proxy:
    """Passes on what goes to the server of a rendezvous, and counts the connections."""

    def __init__(self):
        self.server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.holds = None
        self._lines = []
        self._threads = []
        self._run(self._accept)

    def hold(self):
        """From now on a connection is taken, and nothing is passed on. Then ``holds`` is set."""
        self.holds = threading.Event()

    def _run(self, *call):
        self._threads.append(threading.Thread(target=call[0], args=call[1:], daemon=True))
        self._threads[-1].start()

    def _accept(self):
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return

            self.count += 1
            if self.holds is not None:
                self._lines.append(line)
                self.holds.set()
                continue

            onward = socket.create_connection(("127.0.0.1", self.server.port))
            self._lines += [line, onward]
            self._run(self._pass, line, onward)
            self._run(self._pass, onward, line)

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)

        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        for line in self._lines:
            line.close()

        self._listener.close()


class TestConnections:
    """Each one costs the server of a rendezvous a query to a name server."""

    @pytest.fixture
    def proxy(self):
        proxy = Proxy()
        yield proxy
        proxy.close()

    def test_openings_share_those_to_a_given_store(self, fake, proxy):
        """One for each call under way at once: two ranks wait."""
        given = dist.TCPStore("127.0.0.1", proxy.port, None, False, wait_for_workers=False)
        assert proxy.count == 1
        for name in "abc":
            for store in opened(2, name, rendezvous=given).join():
                store.close()

            assert proxy.count <= 1 + 2

    def test_one_that_is_being_made_ends_with_the_server(self):
        """c10d would go on trying."""
        proxy, own = Proxy(), timedelta(seconds=2)
        lines = Lines(dist.TCPStore("127.0.0.1", proxy.port, None, False, own, wait_for_workers=False))
        assert not lines.gone()
        proxy.hold()
        started = time.monotonic()
        made = Background(lines.own, "connects")
        assert proxy.holds.wait(PROMPT)
        proxy.close()
        assert lines.gone()
        for call in (lambda: made.result(PROMPT), lines.own):
            with pytest.raises(dist.DistNetworkError, match="refused"):
                call()

        assert time.monotonic() - started < own.total_seconds()
        for thread in threading.enumerate():
            if thread.name == "connects once more":
                thread.join(PROMPT)
                assert not thread.is_alive()

    def test_openings_share_those_to_a_server_while_one_is_open(self, fake, proxy, monkeypatch):
        monkeypatch.setattr(rendezvous, "_serve", lambda *_: None)
        url, names = f"tcp://127.0.0.1:{proxy.port}", iter("abc")
        first = opened(2, next(names), rendezvous=url).join()
        before = proxy.count
        assert before <= 2 * (1 + 1)  # each rank looks whether somebody serves, and connects
        for name in names:
            for store in opened(2, name, rendezvous=url).join():
                store.close()

            assert proxy.count == before

        assert [store.rank for store in first] == [0, 1]

    def test_call_that_the_server_refuses_is_the_only_one_that_fails(self, fake, proxy):
        given = dist.TCPStore("127.0.0.1", proxy.port, None, False, wait_for_workers=False)
        board = _board.board_in(given)
        with pytest.raises(dist.DistNetworkError):
            board.add("k" * 100_000, 1)

        board.set("k", "v")
        assert board.get("k") == b"v"

    @pytest.mark.parametrize("ends", [True, False])
    def test_server_that_is_just_ending_is_gone(self, monkeypatch, ends):
        """It has dropped its connections, and takes one more."""
        ours, theirs = socket.socketpair()
        monkeypatch.setattr(_board.socket, "create_connection", lambda *_: ours)
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        if ends:
            threading.Timer(0.05, theirs.close).start()

        assert Lines(server).gone(LONG if ends else 0.05) is ends
        theirs.close()

    def test_server_that_ends_while_it_is_reached_is_gone(self, monkeypatch):
        """Nobody else notices."""
        asked, over = threading.Event(), threading.Event()
        monkeypatch.setattr(_board, "LOOK", 0.05)
        monkeypatch.setattr(_board, "own_line", lambda store: asked.set() or over.wait(LONG))
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        lines = Lines(server)
        waiting = Background(lines.own)
        assert asked.wait(LONG)

        def refused(*_):
            raise ConnectionRefusedError("nobody listens")

        monkeypatch.setattr(_board.socket, "create_connection", refused)
        with pytest.raises(dist.DistNetworkError, match="nobody listens"):
            waiting.result(PROMPT)

        over.set()

    def test_forked_child_has_connections_of_its_own(self, proxy):
        given = dist.TCPStore("127.0.0.1", proxy.port, None, False, wait_for_workers=False)
        board = _board.board_in(given)
        board.set("k", "v")
        before = proxy.count
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(board.get("k") != b"v")

        assert os.waitpid(child, 0)[1] == 0
        assert proxy.count == before + 1
        assert board.get("k") == b"v"
        assert proxy.count == before + 1

    def test_forked_child_of_rank_0_meets_its_parent(self, fake):
        url = f"tcp://127.0.0.1:{free_port()}"
        open_store("first", rank=0, world_size=1, rendezvous=url, timeout=LONG).close()
        fake.Store.opened.clear()
        fake.Store.closed.clear()

        def meet(rank):
            return open_store("x", rank=rank, world_size=2, rendezvous=url, timeout=20.0).rank

        child = os.fork()
        if child == 0:
            signal.alarm(30)
            with contextlib.suppress(BaseException):
                os._exit(meet(1) - 1)

            os._exit(1)

        assert meet(0) == 0
        assert os.waitpid(child, 0)[1] == 0

    def test_ranks_of_rank_0s_process_have_connections_of_their_own(self, fake, monkeypatch):
        """They come at once, after all that was open there is closed."""
        url, together, given = f"tcp://127.0.0.1:{free_port()}", threading.Barrier(2, timeout=PROMPT), []
        open_store("first", rank=0, world_size=1, rendezvous=url, timeout=LONG).close()
        fake.Store.opened.clear()
        fake.Store.closed.clear()
        board_at = _board.board_at

        def at_once(address, place, connect):
            def line():
                given.append(one := connect())
                together.wait()
                return one

            return board_at(address, place, line)

        monkeypatch.setattr(rendezvous, "board_at", at_once)
        assert [store.rank for store in opened(2, rendezvous=url).join()] == [0, 1]
        assert len(given) == 2 and given[0] is not given[1]

    def test_server_that_takes_the_place_of_another_is_found(self, fake, monkeypatch):
        """Something is still open that was opened at the first one."""
        monkeypatch.setattr(rendezvous, "_serve", lambda *_: None)
        proxy = Proxy()
        url = f"tcp://127.0.0.1:{proxy.port}"
        held = opened(2, "a", rendezvous=url).join()
        proxy.close()
        server = dist.TCPStore("127.0.0.1", proxy.port, None, True, wait_for_workers=False)
        assert [store.rank for store in opened(2, "b", rendezvous=url).join()] == [0, 1]
        assert [store.rank for store in held] == [0, 1]
        assert server.num_keys() > 0


class TestStoreOfSomebodyElse:
    @pytest.mark.parametrize(
        ("own", "timeout", "kind"), [(4.0, 1.0, StoreTimeoutError), (SHORT, PROMPT, PeerLostError)]
    )
    def test_whose_server_is_gone(self, own, timeout, kind):
        """c10d tries again for the time of the store's own, after pauses of a second or more."""
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        given = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=own), wait_for_workers=False)
        del server
        started = time.monotonic()
        with pytest.raises(kind, match="the server of the given TCPStore"):
            open_store("x", rank=0, world_size=2, rendezvous=given, timeout=timeout)

        assert time.monotonic() - started < PROMPT

    def test_written_in_python_without_clone(self, fake):
        class Plain(dist.Store):
            def __init__(self):
                super().__init__()
                self.inner = dist.HashStore()

            def set(self, key, value):
                self.inner.set(key, value)

            def get(self, key):
                return self.inner.get(key)

            def add(self, key, amount):
                return self.inner.add(key, amount)

            def check(self, keys):
                return self.inner.check(keys)

            def compare_set(self, key, expected, desired):
                return self.inner.compare_set(key, expected, desired)

            def wait(self, keys, timeout=None):
                self.inner.wait(keys, timeout)

            def delete_key(self, key):
                return self.inner.delete_key(key)

        plain = Plain()
        for _ in range(2):
            assert [store.rank for store in opened(2, rendezvous=plain).join()] == [0, 1]


class TestUrl:
    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("http://127.0.0.1:80", "the scheme must be tcp://host:port, file:///path or env://"),
            ("127.0.0.1:80", "the scheme must be"),
            ("", "the scheme must be"),
            ("tcp://127.0.0.1", "needs a host and a port"),
            ("tcp://127.0.0.1:0", "needs a host and a port"),
            ("tcp://127.0.0.1:port", "needs a host and a port"),
            ("tcp://:29500", "needs a host and a port"),
            ("tcp://127.0.0.1:29500?rank=0", "rank and world_size are arguments"),
            ("file://relative/path", "file:///path"),
            ("file://", "file:///path"),
        ],
    )
    def test_unreadable(self, fake, url, said):
        with pytest.raises(ValueError, match=said):
            open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=url)

    def test_file_that_can_not_be_written(self, fake, tmp_path):
        with pytest.raises(DtorchError, match="rendezvous file:///.* can't be used: .*no_such_folder") as caught:
            open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=f"file://{tmp_path}/no_such_folder/file")

        assert isinstance(caught.value.__cause__, FileNotFoundError)

    def test_nobody_serves(self, fake):
        url = f"tcp://127.0.0.1:{free_port()}"
        ranks = Ranks([lambda: open_store("x", rank=1, world_size=2, timeout=SHORT, rendezvous=url)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "within 0.3 s" in text
        assert "Is rank 0 up" in text
        assert ranks.seconds < SHORT + 1

    @pytest.mark.parametrize("rank", [0, 1])
    def test_port_of_a_service_that_never_answers(self, fake, monkeypatch, rank):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            place = f"127.0.0.1:{other.getsockname()[1]}"
            if rank == 0:  # its server is elsewhere: as if the host were another machine's name
                monkeypatch.setattr(rendezvous, "_serve", lambda *_: None)

            url = f"tcp://{place}"
            ranks = Ranks([lambda: open_store("x", rank=rank, world_size=2, timeout=SHORT, rendezvous=url)])
            (text,) = raised(ranks.join(), StoreTimeoutError)
            left = [thread for thread in threading.enumerate() if thread.name == f"connecting to {place}"]

        assert f"no rendezvous at {place} within 0.3 s: something takes the connection there" in text
        assert "had not come" not in text
        assert ranks.seconds < SHORT + 1
        assert all(thread.daemon for thread in left)
        for thread in left:  # the service is gone: so is c10d's wait
            thread.join(PROMPT)

    def test_connecting_counts_against_the_timeout(self, fake, monkeypatch):
        """A rank that connects late has what is left, and names the rank that is not there: never itself."""
        wait = rendezvous._wait_for_server

        def slow(*arguments):
            time.sleep(SHORT)
            wait(*arguments)

        monkeypatch.setattr(rendezvous, "_wait_for_server", slow)
        url = f"tcp://127.0.0.1:{free_port()}"
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=2 * SHORT, rendezvous=url)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "0.6 s: rank 1 had not come" in text
        assert ranks.seconds < 2 * SHORT + 0.25

    def test_port_is_taken(self, fake):
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(DtorchError, match="rank 0 can't serve the rendezvous at 127.0.0.1"):
                open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=url)


class TestEnvironment:
    """torchrun's variables count where its WORLD_SIZE is that of the opening."""

    @pytest.fixture
    def torchrun(self, site):
        site.env("MASTER_ADDR", "127.0.0.1")
        site.env("MASTER_PORT", str(free_port()))
        site.env("WORLD_SIZE", "2")
        return site

    def test_is_used(self, fake, torchrun):
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=SHORT)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "open_store('x') at torchrun's environment (env://)" in text

    def test_is_not_used_for_another_size(self, fake, torchrun):
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=3, timeout=SHORT)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert f"at process {os.getpid()}" in text

    def test_is_not_used_inside_a_spawn(self, fake, torchrun):
        assert spawn(lambda ctx: ctx.open_store("x", timeout=LONG).world_size, 2, timeout=LONG) == [2, 2]

    def test_agent_serves_the_store_itself(self, fake, torchrun):
        """torchrun keeps the server in its agent; a restart of the workers begins anew."""
        port = int(os.environ["MASTER_PORT"])
        agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        torchrun.env("TORCHELASTIC_USE_AGENT_STORE", "True")
        for restart in ("0", "1"):
            torchrun.env("TORCHELASTIC_RESTART_COUNT", restart)
            opened(2).join()
            assert agent.get(f"attempt {restart}/dtorch/store/x/openings") == b"1"

    @pytest.mark.parametrize(
        ("variable", "value"), [("MASTER_PORT", None), ("MASTER_PORT", "x"), ("MASTER_ADDR", None)]
    )
    def test_says_what_is_missing(self, fake, torchrun, variable, value):
        torchrun.env(variable, value)
        with pytest.raises(ValueError, match="needs MASTER_ADDR and MASTER_PORT"):
            open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous="env://")


class TestProcesses:
    SCRIPT = """
        import sys
        from dtorch_core import open_store

        rank, size, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        store = open_store("x", rank=rank, world_size=size, rendezvous=url, timeout=60)
        pids = [member.pid for member in store.topology]
        assert len(set(pids)) == size and store.topology.same_host and not store.topology.same_process
        print(store.backend, flush=True)
        store.close()
    """

    def start(self, site, rank, size, url):
        command = [sys.executable, "-c", textwrap.dedent(self.SCRIPT), str(rank), str(size), url]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=site.environment, stdout=pipe, stderr=pipe, text=True)

    @pytest.mark.parametrize("scheme", ["tcp", "file"])
    def test_meet(self, fake, site, tmp_path, scheme):
        url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
        processes = [self.start(site, rank, 2, url) for rank in range(2)]
        try:
            for process in processes:
                out, err = process.communicate(timeout=120)
                assert (out.strip(), process.returncode) == ("fake", 0), err
        finally:
            for process in processes:
                process.kill()
                process.wait(10)

    def test_death_of_the_server_ends_the_waits(self, fake, site):
        url = f"tcp://127.0.0.1:{free_port()}"
        server = self.start(site, 0, 3, url)
        try:
            ranks = Ranks([lambda: open_store("x", rank=1, world_size=3, timeout=LONG, rendezvous=url)])
            port, limit = int(url.rpartition(":")[2]), timedelta(seconds=LONG)
            watch = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
            watch.wait(["dtorch/store/x/0/members/0", "dtorch/store/x/0/members/1"], limit)
        finally:
            server.kill()
            server.wait(10)

        (text,) = raised(ranks.join(), PeerLostError)
        assert "the rendezvous is gone" in text
        server.communicate()


class TestAgreement:
    def test_ranks_that_name_different_backends(self, fake, site):
        site.backend("other-dist", "other", plugin="other")
        refresh()
        ranks = opened(3, backend=lambda rank: "other" if rank == 1 else None)
        for text in raised(ranks.join(), NoBackendError):
            assert "the ranks do not agree on a store backend" in text
            assert "rank 0: fake (decided by score)" in text
            assert "rank 1: other (decided by argument)" in text
            assert "rank 2: fake (decided by score)" in text

        assert ranks.seconds < PROMPT

    def test_one_rank_that_can_not_choose(self, fake):
        for text in raised(opened(2, backend=lambda rank: "fkae" if rank == 1 else None).join(), NoBackendError):
            assert "rank 0: fake (decided by score)" in text
            assert "rank 1: there is no store backend 'fkae' (asked for by argument). Did you mean 'fake'?" in text

    def test_all_ranks_that_can_not_choose_raise_their_own_reason(self, fake):
        for text in raised(opened(2, backend="network").join(), NoBackendError):
            assert text.startswith("store backend 'network' (asked for by argument) is absent")

    def test_observers_hear_of_a_choice_on_every_rank_and_of_no_disagreement(self, fake, site):
        source = """
            from dtorch_core import hookimpl
            seen = []

            @hookimpl
            def dtorch_backend_selected(selection):
                seen.append(selection)
        """
        observer = site.add("observer-dist", source)
        refresh()
        opened(2, backend=lambda rank: "fake" if rank else "fkae").join()
        assert site.loaded(observer).seen == []
        stores = opened(3).join()
        assert [s.chosen for s in site.loaded(observer).seen] == ["fake"] * 3
        assert stores[0].selection in site.loaded(observer).seen

    def test_rank_whose_device_is_not_there_has_not_come(self, fake):
        outcomes = opened(3, device=lambda rank: "cuda:99" if rank == 2 else "cpu", timeout=SHORT).join()
        raised(outcomes[2:], ValueError)
        for text in raised(outcomes[:2], StoreTimeoutError):
            assert "rank 2 had not come" in text

    def test_probe_that_answers_differently_on_one_rank(self, fake, site):
        probe = "Support.yes(9000, 'x') if __import__('threading').current_thread().name == 'odd' else Support.no('y')"
        site.backend("moody-dist", "moody", probe, plugin="moody")
        refresh()

        def odd():
            threading.current_thread().name = "odd"
            return open_store("x", rank=1, world_size=2, timeout=LONG)

        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=LONG), odd])
        for text in raised(ranks.join(), NoBackendError):
            assert "rank 0: fake (decided by score)" in text
            assert "rank 1: moody (decided by score)" in text


class TestFacts:
    PLUGIN = """
        from dtorch_core import hookimpl

        @hookimpl
        def dtorch_describe_member(member):
            {body}
    """

    def describe(self, site, body, plugin):
        site.add(f"{plugin}-dist", self.PLUGIN.replace("{body}", body), plugin=plugin)
        refresh()

    def test_reach_the_probe_on_every_rank(self, site):
        probe = "Support.yes(1000, ' '.join(member.facts['big.pages'] for member in topology))"
        module = site.module(site.STORE)
        site.backend("big-dist", "big", probe, factory=f"{module}:Store", plugin="big")
        self.describe(site, "return {'big.pages': f'{member.rank} of {member.device}'}", "facts")
        for store in opened(3).join():
            assert store.selection.why == "0 of cpu 1 of cpu 2 of cpu"

    def test_two_plugins_can_not_change_each_others(self, fake, site):
        self.describe(site, "return {'one.x': 'first', 'one.y': 'kept'}", "a-facts")
        self.describe(site, "return {'one.x': 'second', 'two.x': 'mine'}", "b-facts")
        (store,) = opened(1).join()
        assert store.topology[0].facts == {"one.x": "first", "one.y": "kept", "two.x": "mine"}
        (problem,) = registry().problems
        assert "dtorch_describe_member of b-facts-dist 1.0: the fact 'one.x' is another plugin's" in problem

    @pytest.mark.parametrize("body", ["return {'x': 1}", "return {1: 'x'}", "return ['x']", "return None", "1 / 0"])
    def test_bad_ones_are_reported_and_left_out(self, fake, site, body):
        self.describe(site, body, "bad")
        self.describe(site, "return {'good.fact': 'here'}", "good")
        for store in opened(2).join():
            assert store.topology[1].facts == {"good.fact": "here"}

        assert all("dtorch_describe_member of bad-dist 1.0" in problem for problem in registry().problems)
        assert registry().problems


class TestFactory:
    def test_gets_the_context(self, fake):
        seen = {}
        fake.behave.update({rank: lambda ctx: seen.setdefault(ctx.rank, ctx) for rank in range(2)})
        stores = opened(2, timeout=LONG).join()
        for rank, ctx in seen.items():
            assert (ctx.kind, ctx.name, ctx.rank, ctx.world_size, ctx.device) == ("store", "x", rank, 2, "cpu")
            assert (ctx.topology, ctx.timeout) == (stores[0].topology, LONG)
            assert ctx.selection.chosen == "fake"

    def test_rendezvous_is_shared_by_its_ranks_alone(self, fake):
        found = []

        def claim(ctx):
            found.append(ctx.rendezvous.compare_set("owner", "", f"rank {ctx.rank}").decode())

        fake.behave.update({rank: claim for rank in range(3)})
        opened(3).join()
        opened(3).join()
        assert [len(set(found[:3])), len(set(found[3:]))] == [1, 1]

    def test_factories_exchange_what_they_say(self, fake):
        found, tokens = {}, []

        def exchange(ctx):
            tokens.append(ctx.token)
            found[ctx.rank] = ctx.exchange({"rank": ctx.rank, "odd": [ctx.name, None]})
            with pytest.raises(ProtocolError, match=f"rank {ctx.rank}: exchange.*once"):
                ctx.exchange({})

        fake.behave.update({rank: exchange for rank in range(3)})
        stores = opened(3).join()
        assert found == {rank: [{"rank": other, "odd": ["x", None]} for other in range(3)] for rank in range(3)}
        assert len(set(tokens)) == 1 and tokens[0].isalnum()
        opened(3).join()
        assert len(set(tokens)) == 2
        with pytest.raises(ProtocolError):
            stores[0].context.exchange({})

    @pytest.mark.parametrize("comes", [True, False])
    def test_factory_that_fails_ends_the_exchange_of_the_others(self, fake, comes):
        def exchange(ctx):
            ctx.exchange({})

        def fail(ctx):
            if comes:
                ctx.exchange({})

            raise OSError("no room")

        fake.behave.update({0: exchange, 1: fail, 2: exchange})
        ranks = opened(3)
        outcomes = ranks.join()
        raised(outcomes[1:2], OSError)
        for text in raised([outcomes[0], outcomes[2]], AbortedError):
            assert "rank 1 failed: OSError: no room" in text

        assert ranks.seconds < PROMPT

    def test_rank_that_finds_another_one_gone_learns_why(self, fake):
        errors = {}

        def ask(ctx):
            errors[ctx.rank] = ctx.failure(LONG)
            raise errors[ctx.rank]

        fake.behave.update({0: ask, 1: lambda ctx: 1 / 0})
        raised(opened(2).join()[:1], AbortedError)
        assert "rank 1 failed: ZeroDivisionError" in str(errors[0])
        fake.behave.update({0: lambda ctx: errors.update({2: ctx.failure(0.01)}), 1: lambda ctx: None})
        assert [store.rank for store in opened(2).join()] == [0, 1]
        assert errors[2] is None

    @pytest.mark.parametrize("odd", [0, 1, 2])
    def test_raises_on_one_rank(self, fake, odd):
        def fail(ctx):
            raise OSError("no room")

        fake.behave[odd] = fail
        ranks = opened(3)
        outcomes = ranks.join()
        raised([outcomes.pop(odd)], OSError)
        for text in raised(outcomes, AbortedError):
            assert f"rank {odd} failed: OSError: no room" in text

        assert ranks.seconds < PROMPT
        assert len(fake.Store.closed) == len(fake.Store.opened) == 2

    def test_raises_on_every_rank(self, fake):
        def fail(ctx):
            raise OSError(f"no room on {ctx.rank}")

        fake.behave.update({rank: fail for rank in range(3)})
        outcomes = opened(3).join()
        assert [isinstance(outcome, OSError) for outcome in outcomes] == [True] * 3
        assert [str(outcome) for outcome in outcomes] == [f"no room on {rank}" for rank in range(3)]

    def test_close_that_raises_hides_nothing(self, fake):
        def fail(ctx):
            raise OSError("no room")

        def close(store):
            raise RuntimeError("in close")

        fake.behave[1] = fail
        fake.Store.close = close
        outcomes = opened(2).join()
        assert "rank 1 failed: OSError: no room" in raised(outcomes[:1], AbortedError)[0]

    def test_exits(self, fake):
        fake.behave[0] = lambda ctx: sys.exit(3)
        outcomes = opened(2).join()
        assert r"called sys.exit(3)" in raised(outcomes[:1], PluginError)[0]
        assert "rank 0 failed" in raised(outcomes[1:], AbortedError)[0]

    def test_is_interrupted(self, fake):
        def interrupt(ctx):
            raise KeyboardInterrupt

        fake.behave[0] = interrupt
        outcomes = opened(2).join()
        raised(outcomes[:1], KeyboardInterrupt)
        assert "rank 0 failed: KeyboardInterrupt" in raised(outcomes[1:], AbortedError)[0]

    @pytest.mark.parametrize(
        ("factory", "said"),
        [
            ("no_such_module_of_ours:Store", "can't be imported: ModuleNotFoundError"),
            ("json:no_such_attribute", "can't be imported: AttributeError"),
            ("json.decoder:JSONDecoder.no_such", "can't be imported: AttributeError"),
            ("plugin_that_raises_when_it_is_chosen:Store", "can't be imported: OSError: no driver"),
            ("json:__name__", "is not callable"),
            ("builtins:repr", "its factory returned str, not a TensorStore"),
        ],
    )
    def test_that_makes_no_store(self, site, factory, said):
        site.module("raise OSError('no driver')", name="plugin_that_raises_when_it_is_chosen")
        site.backend("odd-dist", "odd", factory=factory, plugin="odd")
        refresh()
        outcomes = opened(2).join()
        assert any(isinstance(outcome, PluginError) and said in str(outcome) for outcome in outcomes)
        for text in raised(outcomes, (PluginError, AbortedError)):
            assert said in text

    def test_that_is_slower_than_the_timeout(self, fake):
        done = threading.Event()
        fake.behave[1] = lambda ctx: done.wait(10)
        ranks = opened(2, timeout=SHORT)
        time.sleep(2 * SHORT)
        done.set()
        for text in raised(ranks.join(), StoreTimeoutError):
            assert "rank 0 gave up after 0.3 s: rank 1 had not built its handle" in text

        assert len(fake.Store.closed) == len(fake.Store.opened) == 2


class TestNested:
    """A factory opens a store over the same ranks; it is given up with the opening that it is for."""

    def test_opens(self, fake):
        inner = {}

        def nest(ctx):
            inner[ctx.rank] = ctx.open_store("data")

        fake.behave.update({rank: nest for rank in range(3)})
        for _ in range(2):
            opened(3).join()
            assert [inner[rank].name for rank in range(3)] == ["x/data"] * 3
            assert [inner[rank].rank for rank in range(3)] == [0, 1, 2]

    @pytest.mark.parametrize("first", ["the peers wait", "it fails"])
    def test_peers_inside_are_woken(self, fake, first):
        waiting, failed = threading.Event(), threading.Event()

        def nest(ctx):
            if first == "it fails":
                assert failed.wait(10)

            waiting.set()
            ctx.open_store("data")

        def fail(ctx):
            if first == "the peers wait":
                assert waiting.wait(10)
                time.sleep(SHORT)

            raise OSError("no room")

        def run_rank(rank):
            try:
                return open_store("x", rank=rank, world_size=3, timeout=LONG)
            finally:
                if rank == 1:
                    failed.set()

        fake.behave.update({0: nest, 1: fail, 2: nest})
        ranks = Ranks([lambda r=r: run_rank(r) for r in range(3)])
        outcomes = ranks.join()
        raised(outcomes[1:2], OSError)
        for text in raised([outcomes[0], outcomes[2]], AbortedError):
            assert "open_store('x/data') inside open_store('x')" in text
            assert "rank 1 failed: OSError: no room" in text

        assert ranks.seconds < PROMPT

    def test_refusal_says_who_asked_for_the_store(self, site):
        source = """
        from dtorch_core import BackendSpec, Support, hookimpl

        def make(ctx):
            ctx.open_store("data")

        @hookimpl
        def dtorch_register_thread_groups():
            return [BackendSpec("needy", f"{__name__}:make", lambda topology: Support.yes(1, "fits"))]
        """
        site.add("needy-dist", source, plugin="needy")
        site.backend("far-dist", "far", "Support.no('too far')", plugin="far")
        site.env("DTORCH_LOAD_PLUGINS", "needy,far")
        refresh()
        calls = [lambda r=r: open_group("g", rank=r, world_size=2, timeout=LONG) for r in range(2)]
        for text in raised(Ranks(calls).join(), NoBackendError):
            assert text.startswith("the group 'g' (needy) asked for a store over its ranks: store for 2 ranks")
            assert "too far" in text

    def test_after_the_opening_it_stands_alone(self, fake):
        contexts = {}
        fake.behave.update({rank: lambda ctx: contexts.setdefault(ctx.rank, ctx) for rank in range(2)})
        opened(2).join()
        for _ in range(2):
            stores = Ranks([lambda r=r: contexts[r].open_store("later") for r in range(2)]).join()
            assert [store.name for store in stores] == ["x/later"] * 2


class TestSpawn:
    def test_names_meet_in_each_run_alone(self, fake):
        def run(ctx):
            return ctx.open_store("x", timeout=LONG).topology

        def spawned():
            return spawn(run, 2, timeout=LONG)

        for topologies in Ranks([spawned] * 4).join():
            assert topologies[0] == topologies[1]

    @pytest.mark.parametrize("where", ["before it opens", "in its factory", "in its body"])
    def test_peer_that_fails_wakes_an_opening(self, fake, where):
        def fail(ctx=None):
            raise OSError("no room")

        if where == "in its factory":
            fake.behave[2] = fail
            fake.behave.update({rank: lambda ctx: ctx.open_store("data") for rank in (0, 1)})

        def run(ctx):
            if ctx.rank == 2 and where == "before it opens":
                fail()

            ctx.open_store("x", timeout=LONG)
            if ctx.rank == 2 and where == "in its body":
                fail()

            ctx.open_store("y", timeout=LONG)

        started = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            spawn(run, 3)

        assert "OSError: no room" in str(caught.value)
        assert "left behind" not in str(caught.value)
        assert caught.value.rank == 2
        assert time.monotonic() - started < PROMPT

    def test_peer_that_returns_without_opening_costs_the_timeout(self, fake):
        def run(ctx):
            if ctx.rank:
                ctx.open_store("x", timeout=SHORT)

        with pytest.raises(RankFailedError, match="rank 0 had not come"):
            spawn(run, 3, timeout=LONG)
