"""What TensorStore gives every backend, and what the core refuses in a backend."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dtorch_core
from dtorch_core import (
    AbortedError,
    BackendSpec,
    DtorchError,
    PluginError,
    ProtocolError,
    StoreTimeoutError,
    Support,
    TensorStore,
    UnsupportedTensorError,
    hookimpl,
    open_store,
)
from dtorch_core.checks import check_publish

LIMIT = 10.0


class Recorder(TensorStore):
    """A store that writes down what it is asked."""

    def __init__(self, ctx):
        super().__init__(ctx)
        self.calls = []
        self.value = torch.arange(6.0)

    def src_set(self, key, tensor, get_count, *, stream=None, dest_device=None, writable=False):
        self.calls.append(("src_set", key, get_count, stream, dest_device, writable))

    def src_wait_until_get_finished(self, key, *, stream=None, timeout=None):
        self.calls.append(("wait", key, stream, timeout))

    def dest_get(self, key, *, stream=None, timeout=None):
        self.calls.append(("get", key, stream, timeout))
        return self.value

    def dest_finish_get(self, key, *, stream=None):
        self.calls.append(("finish", key, stream))

    def reset(self, *, timeout=None):
        self.calls.append(("reset", timeout))

    def barrier(self, *, timeout=None):
        self.calls.append(("barrier", timeout))

    def empty(self, size, *, dtype, device=None):
        return torch.empty(size, dtype=dtype)

    def close(self):
        self.calls.append(("close",))


class Aborting(Recorder):
    def abort(self, reason, *, died=False):
        self.calls.append(("abort", reason, died))


def not_a_store(ctx):
    return {"rank": ctx.rank}


def raises_on_rank_1(ctx):
    if ctx.rank == 1:
        raise OSError("no room on rank 1")

    return BUILT.setdefault(ctx.rank, Recorder(ctx))


def reads_its_context(ctx):
    BUILT[ctx.rank] = ctx
    return Recorder(ctx)


BUILT = {}


class Plugin:
    @hookimpl
    def dtorch_register_tensor_stores(self):
        names = ["Recorder", "Aborting", "not_a_store", "raises_on_rank_1", "reads_its_context", "missing"]
        return [
            BackendSpec(name, f"{__name__}:{name}", lambda topology: Support.yes(-1, "a test's"), capabilities={"cpu"})
            for name in names
        ] + [BackendSpec("no module", "no_such_module:Store", lambda topology: Support.yes(-1, "a test's"))]


@pytest.fixture(autouse=True)
def registered():
    BUILT.clear()
    dtorch_core.register(Plugin(), name="stores of test_store_base")
    yield
    dtorch_core.unregister("stores of test_store_base")


@pytest.fixture
def store():
    return open_store("s", rank=0, world_size=1, backend="Recorder")


def on_threads(call, world_size=2):
    """``call(rank)`` in a thread each: the results or errors by rank."""

    def guarded(rank):
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(guarded, range(world_size), timeout=LIMIT))


class TestPublishAndBorrow:
    def test_publish_sets_then_waits(self, store):
        with store.publish("k", store.value, 2, stream="s", dest_device="cpu", writable=True, timeout=3):
            assert store.calls == [("src_set", "k", 2, "s", "cpu", True)]

        assert store.calls[1:] == [("wait", "k", "s", 3)]

    def test_publish_does_not_wait_after_an_error(self, store):
        with pytest.raises(ZeroDivisionError), store.publish("k", store.value, 1):
            raise ZeroDivisionError

        assert [call[0] for call in store.calls] == ["src_set"]

    def test_borrow_gets_then_finishes(self, store):
        with store.borrow("k", stream="s", timeout=3) as got:
            assert got is store.value
            assert store.calls == [("get", "k", "s", 3)]

        assert store.calls[1:] == [("finish", "k", "s")]

    def test_borrow_finishes_after_an_error(self, store):
        with pytest.raises(ZeroDivisionError), store.borrow("k"):
            raise ZeroDivisionError

        assert [call[0] for call in store.calls] == ["get", "finish"]

    def test_copy_to_device_ends_the_borrow(self, store):
        copy = store.dest_get_to_device("k", "cpu", timeout=3)
        assert copy.tolist() == store.value.tolist()
        assert copy.data_ptr() != store.value.data_ptr()
        assert [call[0] for call in store.calls] == ["get", "finish"]
        assert store.calls[0][3] == 3

    def test_copy_to_device_ends_the_borrow_when_it_fails(self, store):
        store.value = None  # has no copy
        with pytest.raises(AttributeError):
            store.dest_get_to_device("k", "cpu")

        assert [call[0] for call in store.calls] == ["get", "finish"]

    @pytest.mark.parametrize("device", ["nowhere", "meta", "cuda:99", torch.device("cuda", 99)])
    def test_copy_to_a_device_that_is_not_there_borrows_nothing(self, store, device):
        with pytest.raises(ValueError, match=r"dest_get_to_device\('k'\): device .*(nowhere|meta|cuda)"):
            store.dest_get_to_device("k", device)

        assert store.calls == []

    @pytest.mark.parametrize("make", [lambda t: t.conj(), lambda t: t.conj().imag, lambda t: t[::2], lambda t: t[1]])
    def test_copy_to_device_has_the_values_of_any_view(self, store, make):
        store.value = make(torch.complex(torch.arange(6.0), torch.arange(6.0) + 10))
        copy = store.dest_get_to_device("k", "cpu")
        assert torch.equal(copy.resolve_conj().resolve_neg(), store.value.resolve_conj().resolve_neg())


class TestLeaving:
    def test_block_that_ends_well_closes(self):
        with open_store("s", rank=0, world_size=1, backend="Aborting") as store:
            pass

        assert store.calls == [("close",)]

    def test_block_that_raises_is_a_death_not_a_goodbye(self):
        with pytest.raises(KeyError), open_store("s", rank=0, world_size=1, backend="Aborting") as store:
            raise KeyError("on purpose")

        assert store.calls == [("abort", "rank 0 failed: KeyError: 'on purpose'", True), ("close",)]

    def test_abort_of_a_backend_that_has_none_closes(self, store):
        store.abort("a reason")
        assert store.calls == [("close",)]

    def test_repr_says_who_it_is(self, store):
        assert repr(store) == "<Recorder 's' rank 0 of 1 on cpu>"


class TestFactories:
    def test_context_holds_what_a_factory_needs(self):
        def open_rank(rank):
            return open_store("named", rank=rank, world_size=2, backend="reads_its_context", timeout=LIMIT)

        stores = on_threads(open_rank)
        for rank, store in enumerate(stores):
            ctx = BUILT[rank]
            assert (ctx.kind, ctx.name, ctx.rank, ctx.world_size) == ("store", "named", rank, 2)
            assert (ctx.device, ctx.timeout, len(ctx.topology)) == ("cpu", LIMIT, 2)
            assert ctx.selection.chosen == store.backend == "reads_its_context"
            assert (store.name, store.rank, store.world_size, store.device) == ("named", rank, 2, "cpu")

        BUILT[0].rendezvous.set("k", "v")
        assert BUILT[1].rendezvous.get("k") == b"v"

    def test_factory_that_returns_something_else_is_named(self):
        with pytest.raises(PluginError, match="'not_a_store': its factory returned dict, not a TensorStore"):
            open_store("s", rank=0, world_size=1, backend="not_a_store")

    @pytest.mark.parametrize(("backend", "match"), [("missing", "missing"), ("no module", "no_such_module")])
    def test_factory_that_cannot_be_imported_is_named(self, backend, match):
        with pytest.raises(PluginError, match=match):
            open_store("s", rank=0, world_size=1, backend=backend)

    def test_factory_that_raises_on_one_rank_fails_the_opening_on_all(self):
        def open_rank(rank):
            return open_store("s", rank=rank, world_size=2, backend="raises_on_rank_1", timeout=LIMIT)

        other, own = on_threads(open_rank)
        assert isinstance(own, OSError)
        assert isinstance(other, DtorchError)
        assert "rank 1" in str(other)
        assert "no room on rank 1" in str(other)
        assert BUILT[0].calls == [("close",)]

    def test_name_can_be_opened_again(self):
        for _ in range(3):
            open_store("s", rank=0, world_size=1, backend="Recorder").close()

    def test_missing_rank_is_named(self):
        with pytest.raises(StoreTimeoutError, match="rank 1 had not come"):
            open_store("s", rank=0, world_size=2, backend="Recorder", timeout=0.2)

    def test_ranks_that_name_different_backends_all_hear_of_it(self):
        def open_rank(rank):
            backend = ("Recorder", "Aborting")[rank]
            return open_store("s", rank=rank, world_size=2, backend=backend, timeout=LIMIT)

        for error in on_threads(open_rank):
            assert isinstance(error, dtorch_core.NoBackendError)
            assert "rank 0: Recorder" in str(error)
            assert "rank 1: Aborting" in str(error)


class TestCheckPublish:
    @pytest.mark.parametrize("get_count", [0, -3, 1.5, True, None, "2"])
    def test_get_count_must_be_a_positive_int(self, get_count):
        with pytest.raises(ProtocolError, match="'k'.*get_count"):
            check_publish("k", torch.arange(3), get_count)

    @pytest.mark.parametrize(("world_size", "ranks"), [(1, "1 rank,"), (3, "3 ranks,")])
    def test_get_count_is_at_most_the_number_of_ranks(self, world_size, ranks):
        check_publish("k", torch.arange(3), world_size, world_size)
        with pytest.raises(ProtocolError, match=rf"'k'.*get_count is {world_size + 1}, and there are? {ranks}"):
            check_publish("k", torch.arange(3), world_size + 1, world_size)

    @pytest.mark.parametrize("key", [None, 5, b"k", ("a", 1), ["k"]])
    def test_keys_are_strings(self, key):
        with pytest.raises(TypeError, match="src_set: a key is a string, not"):
            check_publish(key, torch.arange(3), 1)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(3),
            torch.tensor(3),
            torch.empty(0),
            torch.arange(6).reshape(2, 3).t(),
            torch.nn.Parameter(torch.arange(3.0)),
            torch.arange(3.0, requires_grad=True),
        ],
    )
    def test_dense_tensor_passes(self, tensor):
        check_publish("k", tensor, 1)

    @pytest.mark.parametrize(
        ("tensor", "named"),
        [
            (torch.eye(2).to_sparse(), "sparse"),
            (torch.empty(2, device="meta"), "meta"),
            ([1], "list"),
            (None, "NoneType"),
        ],
    )
    def test_anything_else_is_refused_by_name(self, tensor, named):
        with pytest.raises(UnsupportedTensorError, match=f"'k'.*{named}"):
            check_publish("k", tensor, 1)


class TestThreads:
    def test_aborted_opening_wakes_a_rank_that_waits_for_others(self):
        """A rank of spawn that fails ends the opening of its peers."""
        seen = []

        def rank(ctx):
            if ctx.rank == 1:
                assert started.wait(LIMIT)
                raise ValueError("on purpose")

            started.set()
            try:
                ctx.open_store("s", backend="Recorder", timeout=LIMIT)
            except AbortedError as error:
                seen.append(str(error))
                raise

        started = threading.Event()
        with pytest.raises(dtorch_core.RankFailedError, match="rank 1"):
            dtorch_core.spawn(rank, 2, timeout=LIMIT)

        assert len(seen) == 1
        assert "on purpose" in seen[0]
