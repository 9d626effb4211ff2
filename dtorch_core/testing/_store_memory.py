"""Whose memory it is: of a borrow, of ``empty()``, and when it is let go."""

from __future__ import annotations

import array
import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dtorch_core.errors import DtorchError
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import requires, thorough
from dtorch_core.testing._layouts import LAYOUTS
from dtorch_core.testing._store_base import StoreConformance, coded, same, take


class MemoryTests(StoreConformance):
    """Memory is used once for all, and kept no longer than anybody needs it."""

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
