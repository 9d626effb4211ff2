"""Connections to the server of a rendezvous: who shares them, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dtorch_core import PeerLostError, open_store
from dtorch_core._meeting import board as _board
from dtorch_core._meeting import rendezvous as rendezvous
from dtorch_core._meeting.board import Lines
from dtorch_core.testing import Background

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import opening_ranks
    from opening_ranks import LONG, PROMPT, free_port, opened

fake = opening_ranks.fake


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


def await_attempts():
    """c10d goes on trying to reach a server that is gone, in threads that nobody waits for."""
    for thread in threading.enumerate():
        if thread.name == "connects once more":
            thread.join(PROMPT)
            assert not thread.is_alive()


def reached(store):
    _board.reach(store)
    return store


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

    def test_openings_in_parts_of_a_store_share_those_to_its_server(self, fake, proxy):
        """As process groups of torch.distributed, each of which brings a PrefixStore that is new."""
        given = dist.TCPStore("127.0.0.1", proxy.port, None, False, wait_for_workers=False)
        held = []
        for name in "abc":
            part = reached(dist.PrefixStore(name, dist.PrefixStore("outer", given)))
            held += opened(2, "x", rendezvous=part).join()
            assert proxy.count <= 1 + 2

        assert [store.rank for store in held] == [0, 1] * 3

    def test_parts_of_a_store_are_apart(self, proxy):
        """Whatever connection it is that a rank has given."""
        one, other = (dist.TCPStore("127.0.0.1", proxy.port, None, False, wait_for_workers=False) for _ in range(2))
        first, second, elsewhere = (
            _board.board_in(reached(dist.PrefixStore(name, store)))
            for name, store in (("a", one), ("a", other), ("b", one))
        )
        first.set("k", "v")
        assert second.get("k") == b"v" and second.store().get("k") == b"v"
        assert not elsewhere.check(["k"]) and not _board.board_in(one).check(["k"])
        assert proxy.count == 2 + 2  # one for all calls, and that of store()

    def test_part_of_a_store_keeps_the_stores_patience(self, proxy):
        brief, long = (
            dist.TCPStore("127.0.0.1", proxy.port, None, False, timedelta(seconds=own), wait_for_workers=False)
            for own in (0.05, LONG)
        )
        boards = [_board.board_in(reached(dist.PrefixStore("a", store))) for store in (long, brief)]
        assert boards[0].lines is boards[1].lines
        with pytest.raises(dist.DistStoreError):
            boards[1].under("x").store().get("nothing")

    @pytest.mark.parametrize("again", [False, True])
    def test_server_of_a_given_store_that_has_ended_is_gone(self, monkeypatch, again):
        """c10d would try to reach it for the timeout of the store."""
        monkeypatch.setattr(_board, "LOOK", 0.1)
        proxy, own = Proxy(), timedelta(seconds=1)
        given = dist.TCPStore("127.0.0.1", proxy.port, None, False, own, wait_for_workers=False)
        held = _board.board_in(given) if again else None
        proxy.close()
        started = time.monotonic()
        with pytest.raises(PeerLostError, match="the server of the given TCPStore is gone"):
            open_store("x", rank=0, world_size=2, rendezvous=given, timeout=LONG)

        assert time.monotonic() - started < own.total_seconds()
        assert held is None or held.lines.gone()
        await_attempts()

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
        await_attempts()

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
