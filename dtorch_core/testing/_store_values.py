"""What travels: dtypes, layouts, views, whose memory it is, and what is refused."""

from __future__ import annotations

import array
import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtorch_core.errors import (
    DtorchError,
    PeerLostError,
    ProtocolError,
    StoreTimeoutError,
    UnsupportedOperationError,
    UnsupportedTensorError,
)
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._group_base import all_dtypes
from dtorch_core.testing._group_base import same as same_bits
from dtorch_core.testing._harness import requires, thorough, undeclared
from dtorch_core.testing._store_base import HUGE, SHORT, StoreConformance, coded, same, take
from dtorch_core.testing._subclasses import loud

DTYPES = all_dtypes()


def of_dtype(dtype: torch.dtype, device: str) -> Tensor:
    """Six elements whose bytes count up: right for a dtype that has no arithmetic, too."""
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).to(device).view(dtype)


_base = torch.arange(120, dtype=torch.float32)
_complex = torch.complex(_base, _base + 500)

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "0-dim": lambda: _base[7],
    "one element": lambda: _base[5:6],
    "empty": lambda: _base[:0],
    "empty with a shape": lambda: torch.empty(3, 0, 2),
    "slice of a large storage": lambda: _base[40:46],
    "every second": lambda: _base[1:100:2],
    "columns": lambda: _base.reshape(10, 12)[2:8, 3:7],
    "transposed": lambda: _base.reshape(10, 12).t(),
    "permuted": lambda: _base.reshape(4, 5, 6).permute(2, 0, 1),
    "channels last": lambda: _base.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: _base[3:6].reshape(3, 1).expand(3, 4),
    "expanded scalar": lambda: _base[9].expand(2, 3),
    "overlapping": lambda: _base.as_strided((4, 3), (1, 1), 11),
    "conjugate": lambda: _complex[3:9].conj(),
    "conjugate and strided": lambda: _complex.reshape(10, 12).t()[1:4].conj(),
    "negative": lambda: _complex[3:9].conj().imag,
    "conjugate 0-dim": lambda: _complex[3].conj(),
    "conjugate and negative": lambda: torch._neg_view(_complex[3:9].conj()),
}


class ValueTests(StoreConformance):
    """Any strided dense tensor arrives as it is, and nothing else is let in."""

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_dtype_arrives_bit_for_bit(self, dtype: torch.dtype, device: str) -> None:
        if not self.carried([dtype]):
            pytest.skip("torch itself can't copy it")

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", of_dtype(dtype, device), 1)
                store.src_wait_until_get_finished("k")
                store.src_set("k", of_dtype(dtype, device)[::2], 1)
                store.src_wait_until_get_finished("k")
                return

            got = store.dest_get("k")
            assert (got.dtype, got.shape, str(got.device)) == (dtype, (6,), device)
            assert torch.equal(got.view(torch.uint8).cpu(), of_dtype(dtype, "cpu").view(torch.uint8))
            store.dest_finish_get("k")

            copy = store.dest_get_to_device("k", device)
            assert (copy.dtype, copy.shape, str(copy.device)) == (dtype, (3,), device)
            assert same_bits(copy, of_dtype(dtype, device)[::2])

        self.ranks(body, 2, device)

    @thorough
    @requires("cpu")
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_view_that_torch_cannot_copy_arrives_with_its_values(self) -> None:
        """Half-precision, conjugate and negative."""

        def body(store: TensorStore) -> None:
            values = _complex[3:9].to(torch.complex32)
            wanted = -torch.view_as_real(values) * torch.tensor([1, -1], dtype=torch.float16)
            if store.rank == 0:
                with store.publish("k", torch._neg_view(values.conj()), 1):
                    return

            copy = store.dest_get_to_device("k", "cpu")
            assert torch.equal(torch.view_as_real(copy), wanted)

        self.ranks(body, 2, "cpu")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layout_arrives_with_its_values(self, layout: str, device: str) -> None:
        def body(store: TensorStore) -> None:
            wanted = LAYOUTS[layout]()
            if store.rank == 0:
                # The view is made on the device: a copy there would not have its layout.
                store.src_set("k", moved(wanted, device), 1)
                store.src_wait_until_get_finished("k")
                return

            got = store.dest_get("k")
            assert same(got, wanted.to(device)), f"got {got}, not {wanted}"
            assert same(got.clone(), wanted.to(device))
            store.dest_finish_get("k")

        self.ranks(body, 2, device)

    def test_large_value_arrives_whole(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(1, HUGE, device), 1)
                store.src_wait_until_get_finished("k")
                return

            got, wanted = store.dest_get("k"), coded(1, HUGE, device)
            assert same(got, wanted), f"{(got != wanted).sum()} of {wanted.numel()} elements are wrong"
            store.dest_finish_get("k")

        self.ranks(body, 2, device)

    @requires("cpu")
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_borrowed_storage_spans_its_own_bytes_only(self, layout: str) -> None:
        def body(store: TensorStore) -> None:
            sent = LAYOUTS[layout]()
            store.src_set("k", sent, 1)
            got = store.dest_get("k")
            first_to_last = sum((n - 1) * step for n, step in zip(sent.shape, sent.stride(), strict=True)) + 1
            elements = max(sent.numel(), first_to_last) if sent.numel() else 0
            assert got.untyped_storage().nbytes() <= elements * sent.element_size()
            store.dest_finish_get("k")
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1, "cpu")

    @pytest.mark.parametrize("kind", ["leaf", "not a leaf", "parameter", "in inference mode"])
    def test_requires_grad_arrives_detached(self, kind: str, device: str) -> None:
        def body(store: TensorStore) -> None:
            leaf = coded(0, device=device).requires_grad_()
            made: dict[str, Callable[[], Tensor]] = {
                "leaf": lambda: leaf,
                "not a leaf": lambda: leaf * 1,
                "parameter": lambda: torch.nn.Parameter(leaf),
                "in inference mode": lambda: leaf * 1,
            }
            with torch.inference_mode(kind == "in inference mode"):
                sent = made[kind]()

            before = sent.requires_grad, sent.data_ptr(), sent.untyped_storage().nbytes()
            store.src_set("k", sent, 1)
            got = store.dest_get("k")
            assert (type(got), got.requires_grad, got.grad_fn) == (Tensor, False, None)
            assert same(got, coded(0, device=device))
            store.dest_finish_get("k")
            store.src_wait_until_get_finished("k")
            assert (sent.requires_grad, sent.data_ptr(), sent.untyped_storage().nbytes()) == before

        self.ranks(body, 1, device)

    @thorough
    def test_subclass_arrives_as_the_plain_tensor_that_it_is(self, device: str) -> None:
        """Nothing of its class is asked anything."""

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                for number, shape in enumerate(((7,), (300, 300))):
                    for stage in range(2):
                        store.src_set("k", loud(coded(number, shape, device), stage), 1)
                        store.src_wait_until_get_finished("k")

                return

            for number, shape in enumerate(((7,), (300, 300))):
                got = store.dest_get("k")
                assert type(got) is Tensor
                assert same(got, coded(number, shape, device))
                store.dest_finish_get("k")
                copy = store.dest_get_to_device("k", device)
                assert type(copy) is Tensor
                assert same(copy, coded(number, shape, device))

        self.ranks(body, 2, device)

    @thorough
    @requires("zero_copy")
    def test_subclass_is_written_to(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                memory = coded(0, device=device)
                store.src_set("k", loud(memory), 1, writable=True)
                store.src_wait_until_get_finished("k")
                assert same(memory, coded(1, device=device))
                return

            store.dest_get("k").copy_(coded(1, device=device))
            store.dest_finish_get("k")

        self.ranks(body, 2, device)

    def test_grad_mode_of_the_consumer_is_its_own(self, device: str) -> None:
        """What was published without grad can be computed with under grad, and saved for backward as a clone."""

        def body(store: TensorStore) -> None:
            with torch.no_grad():
                store.src_set("k", coded(0, device=device), 1)

            weight = torch.ones(7, device=device, requires_grad=True)
            got = store.dest_get("k")
            (weight * got.clone()).sum().backward()
            store.dest_finish_get("k")
            assert weight.grad is not None
            assert same(weight.grad, coded(0, device=device))
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1, device)

    def test_borrowed_tensor_is_each_consumers_own_object(self, device: str) -> None:
        """To reshape one in place changes no other, and not the producer's."""

        def body(store: TensorStore) -> None:
            tensor = coded(0, (2, 3), device)
            if store.rank == 0:
                store.src_set("k", tensor, 2)
                store.barrier()
                store.src_wait_until_get_finished("k")
                assert same(tensor, coded(0, (2, 3), device))
                return

            got = store.dest_get("k")
            if store.rank == 1:
                got.t_()
                got.unsqueeze_(0)

            store.barrier()
            if store.rank == 2:
                assert same(got, tensor)

            store.dest_finish_get("k")

        self.ranks(body, 3, device)

    def test_empty_gives_memory_to_publish(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            for number, (shape, dtype) in enumerate(
                [((3, 5), torch.float32), ((), torch.int64), ((0, 4), torch.uint8), ((7,), torch.bfloat16)]
            ):
                wanted = coded(number, shape, device, dtype)
                if store.rank == 1:
                    take(store, f"{number}", wanted)
                    continue

                memory = store.empty(shape, dtype=dtype)
                assert (memory.shape, memory.dtype, str(memory.device)) == (shape, dtype, device)
                store.src_set(f"{number}", memory.copy_(wanted), 1)
                store.src_wait_until_get_finished(f"{number}")

        self.ranks(body, 2, device)

    @requires("zero_copy")
    def test_memory_from_empty_is_not_copied(self, device: str) -> None:
        """What the producer writes there against the rules is seen. (A few KiB may be copied: that costs nothing.)"""
        shape = (256, 1024)

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                memory = store.empty(shape, dtype=torch.float32)
                store.src_set("k", memory.copy_(coded(0, shape, device)), 1)
                store.barrier()
                memory.copy_(coded(1, shape, device))
                if device != "cpu":
                    torch.cuda.synchronize(device)

                store.barrier()
                store.src_wait_until_get_finished("k")
                return

            got = store.dest_get("k")
            assert same(got, coded(0, shape, device))
            store.barrier()
            store.barrier()
            assert same(got, coded(1, shape, device)), "a copy was made"
            store.dest_finish_get("k")

        self.ranks(body, 2, device)

    @requires("zero_copy")
    def test_writable_reaches_the_producer_from_every_consumer(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                memory = store.empty((9,), dtype=torch.float32)
                store.src_set("k", memory.copy_(coded(0, (9,), device)), 3, writable=True)
                store.src_wait_until_get_finished("k")
                assert same(memory, torch.cat([coded(rank, (3,), device) for rank in (1, 2, 3)]))
                return

            part = store.dest_get("k")[3 * (store.rank - 1) : 3 * store.rank]
            assert same(part, coded(0, (9,), device)[3 * (store.rank - 1) : 3 * store.rank])
            part.copy_(coded(store.rank, (3,), device))
            store.dest_finish_get("k")

        self.ranks(body, 4, device)

    @thorough
    @requires("zero_copy")
    @pytest.mark.parametrize("layout", ["expanded", "expanded scalar"])
    def test_writable_is_refused_where_elements_share_memory(self, layout: str, device: str) -> None:
        """In the caller; the key is free afterwards, and to be read it is carried."""

        def body(store: TensorStore) -> None:
            shared = moved(LAYOUTS[layout](), device)
            with pytest.raises(UnsupportedTensorError, match="'k'.*writable=True.*share memory"):
                store.src_set("k", shared, 1, writable=True)

            store.src_set("k", shared, 1)
            take(store, "k", shared)
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1, device)

    @undeclared("zero_copy")
    def test_writable_is_refused_or_honoured(self) -> None:
        def body(store: TensorStore) -> None:
            memory = store.empty((5,), dtype=torch.float32).zero_()
            try:
                store.src_set("k", memory, 1, writable=True)
            except UnsupportedOperationError:
                store.src_set("k", memory, 1)  # the key is free
            else:
                store.dest_get("k").copy_(coded(0, (5,), self.home))
                store.dest_finish_get("k")
                store.src_wait_until_get_finished("k")
                assert same(memory, coded(0, (5,), self.home))

        self.ranks(body, 1)

    def test_copy_to_a_device_is_owned(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                tensor = coded(0, device=device)
                store.src_set("k", tensor, 1)
                store.src_wait_until_get_finished("k")
                tensor.fill_(-1)
                store.barrier()
                store.barrier()
                assert tensor.eq(-1).all()
                return

            copy = store.dest_get_to_device("k", device)
            store.barrier()
            assert same(copy, coded(0, device=device))
            copy.zero_()
            store.barrier()
            with pytest.raises(ProtocolError):  # it ended the borrow
                store.dest_finish_get("k")

        self.ranks(body, 2, device)

    def test_copy_that_fails_ends_the_borrow(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)
                store.barrier()
                store.src_wait_until_get_finished("k")
                return

            store.barrier()
            with pytest.raises((RuntimeError, AssertionError, ValueError)):
                store.dest_get_to_device("k", "cuda:99")

            with pytest.raises(ProtocolError):
                store.dest_finish_get("k")

            # A store that refuses the device before it borrows has left the share to be taken.
            with contextlib.suppress(StoreTimeoutError, PeerLostError), store.borrow("k", timeout=0):
                pass

        self.ranks(body, 2)

    def test_publish_and_borrow_do_the_four_steps(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            for turn in range(3):
                value = coded(turn, device=device)
                if store.rank == 0:
                    with store.publish("k", value, 1):
                        store.barrier()

                    value.fill_(-1)
                else:
                    store.barrier()
                    with store.borrow("k") as got:
                        assert same(got, value)

        self.ranks(body, 2, device)

    def test_publish_does_not_wait_if_its_body_raised(self) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(ZeroDivisionError), store.publish("k", coded(0, device=self.home), 1):
                raise ZeroDivisionError

            take(store, "k", coded(0, device=self.home))
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1)

    def test_borrow_finishes_if_its_body_raised(self) -> None:
        def body(store: TensorStore) -> None:
            store.src_set("k", coded(0, device=self.home), 1)
            with pytest.raises(ZeroDivisionError), store.borrow("k"):
                raise ZeroDivisionError

            store.src_wait_until_get_finished("k", timeout=SHORT)

        self.ranks(body, 1)

    def test_borrow_passes_its_timeout_on(self) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(StoreTimeoutError), store.borrow("k", timeout=SHORT):
                pass

            store.src_set("other", coded(0, device=self.home), 1)
            with pytest.raises(StoreTimeoutError), store.publish("k", coded(0, device=self.home), 1, timeout=SHORT):
                pass

        self.ranks(body, 1)

    @requires("cpu")
    @pytest.mark.parametrize("left", ["after the last finish", "by reset", "by close"])
    def test_reference_is_dropped(self, left: str) -> None:
        """The store keeps a tensor as long as anybody may read it, not longer; the key may be live still."""
        memory: list[weakref.ref[array.array[int]]] = []

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                values = array.array("B", range(200))
                memory.append(weakref.ref(values))
                store.src_set("k", torch.frombuffer(values, dtype=torch.uint8), 2)
                del values

            store.barrier()
            if left == "after the last finish" and store.rank > 0:
                take(store, "k", torch.arange(200, dtype=torch.uint8))
            elif left == "by reset":
                store.reset()

            store.barrier()
            if left == "by close":
                store.close()
            elif store.rank == 0:  # whom the others' finish has reached before it passed the barrier
                gc.collect()
                assert memory[0]() is None

        def rank(ctx: RankContext) -> None:
            store = ctx.open_store("kit", backend=self.backend, timeout=self.patience / 2)
            body(store)
            store.close()

        self.raw_ranks(rank, 3, "cpu")
        gc.collect()
        assert memory[0]() is None

    @requires("cpu")
    def test_consumers_memory_is_given_back(self) -> None:
        """What a consumer has got lives no longer than its borrow, or as a few of a pool that is used again."""
        turns = 16

        def body(store: TensorStore) -> None:
            borrowed: dict[int, StorageWeakRef] = {}
            for turn in range(turns):
                if store.rank == 0:
                    store.src_set("k", coded(turn, (300, 300)), 1)
                    store.src_wait_until_get_finished("k")
                    continue

                got = store.dest_get("k")
                assert same(got, coded(turn, (300, 300)))
                memory = StorageWeakRef(got.untyped_storage())
                borrowed[memory.cdata] = memory  # an address is not used again while it is watched
                del got
                store.dest_finish_get("k")

            store.barrier()
            gc.collect()
            kept = sum(not memory.expired() for memory in borrowed.values())
            assert kept < turns / 2, f"{kept} of {turns} borrowed tensors are in memory still"

        self.ranks(body, 2, "cpu")

    @thorough
    @requires("cpu")
    def test_empty_of_more_than_there_is_says_so(self) -> None:
        """With a way out, and nothing is harmed."""

        def body(store: TensorStore) -> None:
            with pytest.raises(MemoryError, match=r"memory for .*iB") as caught:
                store.empty((1 << 60,), dtype=torch.uint8)

            assert isinstance(caught.value, DtorchError)
            memory = store.empty((7,), dtype=torch.float32)
            store.src_set(f"{store.rank}", memory.copy_(coded(0)), 1)
            take(store, f"{store.rank}", coded(0))
            store.src_wait_until_get_finished(f"{store.rank}")

        for world_size in (1, 2):
            self.ranks(body, world_size, "cpu")

    @pytest.mark.parametrize(
        "what", ["sparse", "csr", "quantized", "seen as quantized", "nested", "meta", "wrapper", "list", "none"]
    )
    def test_what_cannot_be_carried_is_refused_by_name(self, what: str) -> None:
        """In the caller, at src_set; the key is free afterwards."""
        named = {"sparse": "sparse", "csr": "sparse_csr", "list": "list", "none": "NoneType", "wrapper": "_Wrapper"}
        named["seen as quantized"] = "quint8"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototypes, and on their way out
            odd = _odd(what)

        def body(store: TensorStore) -> None:
            with pytest.raises(UnsupportedTensorError, match=named.get(what, what)):
                store.src_set("k", odd, 1)

            store.src_set("k", coded(0, device=self.home), 1)
            take(store, "k", coded(0, device=self.home))
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1)


class _Wrapper(Tensor):
    """A tensor that holds others, as a DTensor does: its own storage has no values."""

    @classmethod
    def around(cls, inner: Tensor) -> Tensor:
        """A wrapper of ``inner``'s shape."""
        made: Tensor = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # noqa: ANN401
        raise NotImplementedError(f"{func} of a wrapper")


def moved(view: Tensor, device: str) -> Tensor:
    """The same view, of a copy of its whole storage on ``device``."""
    if device == "cpu":
        return view

    whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(device)
    moved: Tensor = whole.as_strided(view.shape, view.stride(), view.storage_offset())
    moved = moved.conj() if view.is_conj() else moved
    return torch._neg_view(moved) if view.is_neg() else moved


def _odd(what: str) -> Any:  # noqa: ANN401
    dense = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    made: dict[str, Callable[[], Any]] = {
        "sparse": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.5, 0, torch.quint8),
        "seen as quantized": lambda: torch.arange(6, dtype=torch.uint8).view(torch.quint8),
        "nested": lambda: torch.nested.nested_tensor([dense[0], dense[1, :2]]),
        "meta": lambda: torch.empty(2, 3, device="meta"),
        "wrapper": lambda: _Wrapper.around(dense),
        "list": dense.tolist,
        "none": lambda: None,
    }
    return made[what]()
