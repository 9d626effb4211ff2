"""The memory store: the contract of every store, and what is this one's own."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from dtorch_memory_store.store import MemoryTensorStore

from dtorch_core import KeyInUseError, ProtocolError, StoreTimeoutError, open_store
from dtorch_core.testing import Background, TensorStoreTests

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from memory_ranks import LIMIT, on_ranks


class TestMemoryStoreConforms(TensorStoreTests):
    backend = "memory"
    thorough = True


class TestSharing:
    def test_any_cpu_tensor_is_shared_not_copied(self):
        def body(store):
            tensor = torch.arange(24.0).reshape(4, 6)[1:, ::2]
            if store.rank == 0:
                store.src_set("k", tensor, 2)
                store.barrier()
                store.src_wait_until_get_finished("k")
                return tensor.data_ptr(), tensor.stride()

            got = store.dest_get("k")
            store.barrier()
            assert torch.equal(got, tensor)
            store.dest_finish_get("k")
            return got.data_ptr(), got.stride()

        producer, *consumers = on_ranks(body, 3)
        assert consumers == [producer] * 2

    def test_plain_tensor_may_be_published_writable(self):
        def body(store):
            tensor = torch.arange(6.0)
            if store.rank == 0:
                store.src_set("k", tensor[2:4], 1, writable=True)
                store.src_wait_until_get_finished("k")
                assert tensor.tolist() == [0, 1, 20, 30, 4, 5]
            else:
                store.dest_get("k").mul_(10)
                store.dest_finish_get("k")

        on_ranks(body, 2)

    def test_writable_copy_for_another_device_is_refused(self):
        def body(store):
            with pytest.raises(ProtocolError, match="writable"):
                store.src_set("k", torch.arange(3), 1, writable=True, dest_device="cuda:0")

            store.src_set("k", torch.arange(3), 1, writable=True, dest_device="cpu")

        on_ranks(body, 1)

    def test_default_device_and_dtype_of_the_caller_do_not_matter(self):
        def body(store):
            tensor = torch.arange(10.0)
            with torch.device("meta"):
                store.src_set("k", tensor[3:5], 1)
                got = store.dest_get("k")

            assert got.tolist() == [3, 4]
            store.dest_finish_get("k")
            with torch.device("meta"):
                store.src_wait_until_get_finished("k")

        on_ranks(body, 1)

    def test_view_keeps_its_storage_alive(self):
        def body(store):
            store.src_set("k", torch.arange(1000.0)[500:503], 1)
            gc.collect()
            trash = [torch.full((1000,), -1.0) for _ in range(10)]
            assert store.dest_get("k").tolist() == [500, 501, 502]
            store.dest_finish_get("k")
            del trash

        on_ranks(body, 1)


class TestArguments:
    @pytest.mark.parametrize("device", ["foo", "meta", "cuda:99"])
    def test_device_that_is_not_there_is_refused_by_name(self, device):
        def body(store):
            with pytest.raises(ValueError, match=rf"src_set\('k'\): device '{device}'"):
                store.src_set("k", torch.arange(3), 1, dest_device=device)

            with pytest.raises(ValueError, match=rf"store 'own', empty: device '{device}'"):
                store.empty((2,), dtype=torch.float32, device=device)

            store.src_set("k", torch.arange(3), 1)
            with pytest.raises(ValueError, match=rf"dest_get_to_device\('k'\): device '{device}'"):
                store.dest_get_to_device("k", device)

            assert store.dest_get_to_device("k", "cpu").tolist() == [0, 1, 2]

        on_ranks(body, 1)

    @pytest.mark.parametrize("key", [None, 5, b"k", ["k"]])
    def test_key_must_be_a_string(self, key):
        def body(store):
            for call in (lambda: store.src_set(key, torch.arange(3), 1), lambda: store.dest_get(key)):
                with pytest.raises(TypeError, match="a key is a string, not"):
                    call()

        on_ranks(body, 1)

    @pytest.mark.parametrize(
        ("timeout", "error"),
        [
            ("x", TypeError),
            (True, TypeError),
            (-3, ValueError),
            (-0.5, ValueError),
            (float("nan"), ValueError),
            (float("inf"), ValueError),
        ],
    )
    def test_timeout_must_be_a_number_of_seconds(self, timeout, error):
        def body(store):
            store.src_set("k", torch.arange(3), 1)
            for call in (
                lambda: store.barrier(timeout=timeout),
                lambda: store.reset(timeout=timeout),
                lambda: store.dest_get("other", timeout=timeout),
                lambda: store.src_wait_until_get_finished("k", timeout=timeout),
            ):
                with pytest.raises(error, match="store 'own', rank 0: timeout must be .* not "):
                    call()

        on_ranks(body, 1)

    @pytest.mark.parametrize("timeout", [0, 0.0])
    def test_timeout_of_zero_is_a_look(self, timeout):
        def body(store):
            with pytest.raises(StoreTimeoutError):
                store.dest_get("k", timeout=timeout)

            store.src_set("k", torch.arange(3), 1)
            assert store.dest_get("k", timeout=timeout).tolist() == [0, 1, 2]

        on_ranks(body, 1)


class TestMessages:
    def test_key_in_use_says_who_holds_it_and_what_frees_it(self):
        def body(store):
            if store.rank == 0:
                store.src_set("weights", torch.arange(3), 1)

            store.barrier()
            if store.rank == 1:
                with pytest.raises(KeyInUseError) as caught:
                    store.src_set("weights", torch.arange(3), 1)

                for part in ("'own'", "'weights'", "rank 1", "rank 0", "src_wait_until_get_finished"):
                    assert part in str(caught.value)

        on_ranks(body, 2)

    def test_late_get_says_that_the_shares_are_taken(self):
        def body(store):
            if store.rank == 0:
                store.src_set("k", torch.arange(3), 1)
                store.dest_get("k")

            store.barrier()
            if store.rank == 1:
                with pytest.raises(StoreTimeoutError, match="1 consumer only, taken by rank 0"):
                    store.dest_get("k", timeout=0.05)

            store.barrier()

        on_ranks(body, 2)


class TestOpening:
    def test_ranks_in_threads_of_ones_own_need_no_spawn(self):
        def rank(number):
            with open_store("plain threads", rank=number, world_size=2, timeout=LIMIT) as store:
                assert isinstance(store, MemoryTensorStore)
                if number == 0:
                    store.src_set("k", torch.arange(5), 1)
                    store.src_wait_until_get_finished("k")
                else:
                    with store.borrow("k") as got:
                        assert got.tolist() == [0, 1, 2, 3, 4]

        ranks = [Background(lambda number=number: rank(number)) for number in range(2)]
        for running in ranks:
            running.result()

    def test_store_of_one_rank(self):
        with open_store("alone", rank=0, world_size=1) as store:
            assert store.backend == "memory"
            store.src_set("k", torch.arange(5), 1)
            assert store.dest_get_to_device("k", "cpu").tolist() == [0, 1, 2, 3, 4]

    def test_reference_to_a_taken_tensor_dies_with_the_last_finish(self):
        """Also the exception of a failed second set holds nothing."""
        with open_store("alone", rank=0, world_size=1) as store:
            tensor = torch.arange(5)
            count = sys.getrefcount(tensor)
            store.src_set("k", tensor, 1)
            with pytest.raises(KeyInUseError):
                store.src_set("k", tensor, 1)

            store.dest_get_to_device("k", "cpu")
            store.src_wait_until_get_finished("k")
            assert sys.getrefcount(tensor) == count
