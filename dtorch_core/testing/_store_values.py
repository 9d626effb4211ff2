"""What travels: dtypes, layouts, views, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dtorch_core.errors import UnsupportedTensorError
from dtorch_core.store import TensorStore
from dtorch_core.testing._group_base import same as same_bits
from dtorch_core.testing._harness import requires, thorough
from dtorch_core.testing._layouts import COMPLEX, DTYPES, LAYOUTS, moved, of_dtype
from dtorch_core.testing._store_base import HUGE, StoreConformance, coded, same, take
from dtorch_core.testing._subclasses import Wrapper, loud


class ValueTests(StoreConformance):
    """Any strided dense tensor arrives as it is, and nothing else is let in."""

    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
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
    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
    def test_view_that_torch_cannot_copy_arrives_with_its_values(self) -> None:
        """Half-precision, conjugate and negative."""

        def body(store: TensorStore) -> None:
            values = COMPLEX[3:9].to(torch.complex32)
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

    @pytest.mark.parametrize(
        "what", ["sparse", "csr", "quantized", "seen as quantized", "nested", "meta", "wrapper", "list", "none"]
    )
    def test_what_cannot_be_carried_is_refused_by_name(self, what: str) -> None:
        """In the caller, at src_set; the key is free afterwards."""
        named = {"sparse": "sparse", "csr": "sparse_csr", "list": "list", "none": "NoneType", "wrapper": "Wrapper"}
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


def _odd(what: str) -> Any:  # noqa: ANN401
    dense = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    made: dict[str, Callable[[], Any]] = {
        "sparse": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.5, 0, torch.quint8),
        "seen as quantized": lambda: torch.arange(6, dtype=torch.uint8).view(torch.quint8),
        "nested": lambda: torch.nested.nested_tensor([dense[0], dense[1, :2]]),
        "meta": lambda: torch.empty(2, 3, device="meta"),
        "wrapper": lambda: Wrapper.around(dense),
        "list": dense.tolist,
        "none": lambda: None,
    }
    return made[what]()
