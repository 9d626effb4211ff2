"""The file store: the contract of every store, and the memory that this one hands out."""

import errno
import gc
import itertools
import os
import threading
from pathlib import Path

import pytest
import torch
from dtorch_file_store import segments

from dtorch_core import DtorchError, UnsupportedTensorError
from dtorch_core.testing import TensorStoreTests, run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_store_ranks as ranks
    from file_store_ranks import HOMES, LIMIT, on_ranks, skip_processes, values

node_each = ranks.node_each  # a fixture


class TestOneNode(TensorStoreTests):
    """All ranks are threads of one process."""

    backend = "file"
    thorough = True


@pytest.mark.usefixtures("node_each")
class TestNodeEach(TensorStoreTests):
    backend = "file"
    thorough = True


class TestTwoRanksPerNode(TensorStoreTests):
    """As ``threads_per_process=2`` would be."""

    backend = "file"
    thorough = True

    @pytest.fixture(autouse=True)
    def nodes(self, monkeypatch, request):
        skip_processes(request)
        monkeypatch.setattr(HOMES, lambda topology: [rank // 2 for rank in range(len(topology))])


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


    def test_closed_handle_that_is_kept_holds_no_shared_memory(self):
        """Nor does what it has published, and nobody has finished."""

        def mapped():
            gc.collect()
            return Path("/proc/self/maps").read_text().count("memfd:dtorch")

        def body(store):
            if store.rank == 0:
                store.src_set("k", values(0, 1 << 16), 1)
                store.src_set("own", store.empty([1 << 16], dtype=torch.int64).fill_(3), 1)

            store.barrier()
            inside = mapped()
            store.barrier()
            store.close()
            return store, inside

        before = mapped()
        kept = on_ranks(body, 2)
        assert mapped() == before < kept[0][1]


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
