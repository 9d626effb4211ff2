"""Tensors that are published writable: their consumers write into the producer's memory."""

from __future__ import annotations

import pytest
import torch

from dtorch_core.errors import UnsupportedOperationError, UnsupportedTensorError
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import requires, thorough, undeclared
from dtorch_core.testing._layouts import LAYOUTS, moved
from dtorch_core.testing._store_base import StoreConformance, coded, same, take
from dtorch_core.testing._subclasses import loud


class WritableTests(StoreConformance):
    """What a consumer writes is the producer's, or the backend says that it can't."""

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
