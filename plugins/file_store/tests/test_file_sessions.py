"""Sessions: what is left of them, who may take part, and who is named when one has left."""

import gc
import os
import resource
import socket
import struct
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from dtorch_file_store.places import VARIABLE

from dtorch_core import DtorchError, PeerLostError, RankFailedError, StoreTimeoutError
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_store_ranks as ranks
    from file_store_ranks import HOMES, LIMIT, on_ranks, values

node_each = ranks.node_each  # a fixture


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
