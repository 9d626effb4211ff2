"""An opening in which not every rank can take part: it ends on all of them, with the reason."""

import errno
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from dtorch_file_store import directory, opening, places

from dtorch_core import DtorchError, PeerLostError
from dtorch_core._text import root_cause
from dtorch_core.testing import run_ranks
from dtorch_core.testing._held import Held, left_behind

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_store_ranks as ranks
    from file_store_ranks import LIMIT

node_each = ranks.node_each  # a fixture


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


    def test_no_thread_can_be_started(self, monkeypatch):
        """No room for its stack, or too many: that is said, on every rank, and nothing is left."""
        start = threading.Thread.start

        def starts(thread):
            if thread.name.endswith(" reader") and threading.current_thread().name == "rank 1":
                raise RuntimeError("can't start new thread")

            start(thread)

        def rank(ctx):
            with pytest.raises(DtorchError, match="rank 1.*no thread can be started; raise .*ulimit -u"):
                ctx.open_store("own", backend="file", timeout=LIMIT)

        run_ranks(lambda ctx: ctx.open_store("first", backend="file", timeout=LIMIT).close(), 3, 2 * LIMIT)
        before = Held.now()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", starts)
            run_ranks(rank, 3, 2 * LIMIT)

        assert left_behind(before, LIMIT) == []

    def test_ranks_that_keep_sessions_in_different_folders(self, monkeypatch):
        """Each of them says which rank uses which, and what to set; nothing is left in any."""
        with tempfile.TemporaryDirectory(prefix="dt") as folder:
            places = {f"rank {rank}": os.path.join(folder, "ab"[rank == 1]) for rank in range(3)}
            monkeypatch.setattr(directory, "place_for_new", lambda: places[threading.current_thread().name])

            def rank(ctx):
                with pytest.raises(DtorchError) as raised:
                    ctx.open_store("own", backend="file", timeout=LIMIT)

                assert f"rank {ctx.rank}: the ranks can't meet" in str(raised.value)
                for said in (f"{folder}/a (rank 0, rank 2)", f"{folder}/b (rank 1)", "set DTORCH_SESSION_DIR to one"):
                    assert said in str(raised.value)

            run_ranks(rank, 3, 2 * LIMIT)
            assert os.listdir(f"{folder}/a") == os.listdir(f"{folder}/b") == []


class TestPlaces:
    def test_one_folder_by_two_names(self, tmp_path):
        (tmp_path / "other").symlink_to(tmp_path)
        places.check_same("store 's', rank 0", [places.described(tmp_path), places.described(tmp_path / "other")])

    def test_two_folders_of_one_name(self, tmp_path):
        """As of containers."""
        here, there = places.described(str(tmp_path)), {**places.described(str(tmp_path)), "place": "7:7"}
        with pytest.raises(DtorchError, match=r"\(rank 0\) and .* \(rank 1, rank 2\), which are not one folder"):
            places.check_same("store 's', rank 0", [here, there, there])


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
