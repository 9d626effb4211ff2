"""Keys: any text, many at once, each free again after its wait, and all of one store alone."""

from __future__ import annotations

import random

import pytest
import torch

from dtorch_core.errors import StoreTimeoutError
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._store_base import StoreConformance, coded, same, take


class KeyTests(StoreConformance):
    """What one key carries is no other's."""

    def test_key_is_free_after_the_wait(self, device: str) -> None:
        """The same key again and again without a reset; other shapes and dtypes too."""

        def value(turn: int) -> torch.Tensor:
            return coded(turn, (turn % 4, 3), device, (torch.float32, torch.int16, torch.float64)[turn % 3])

        def body(store: TensorStore) -> None:
            for turn in range(30):
                if store.rank == 0:
                    store.src_set("k", value(turn), 1)
                    store.src_wait_until_get_finished("k")
                else:
                    take(store, "k", value(turn))

        self.ranks(body, 2, device)

    def test_key_may_change_its_producer(self) -> None:
        def body(store: TensorStore) -> None:
            for turn in range(12):
                value = coded(turn, device=self.home)
                if turn % 3 == store.rank:
                    store.src_set("k", value, 2)
                    store.src_wait_until_get_finished("k")
                else:
                    take(store, "k", value)

                store.barrier()  # the next producer may not start before this one's wait is over

        self.ranks(body, 3)

    def test_many_keys_are_in_flight_at_once(self, device: str) -> None:
        keys = [f"key {number}" for number in range(64)]

        def body(store: TensorStore) -> None:
            order = random.Random(store.rank).sample(range(64), 64)
            if store.rank == 0:
                for number in range(64):
                    store.src_set(keys[number], coded(number, (3,), device), 2)

                for number in order:
                    store.src_wait_until_get_finished(keys[number])

                return

            got = {number: store.dest_get(keys[number]) for number in order}
            for number in reversed(order):
                assert same(got.pop(number), coded(number, (3,), device))
                store.dest_finish_get(keys[number])

        self.ranks(body, 3, device)

    def test_keys_are_any_text(self) -> None:
        keys = ["", "a/b", "a b", "../k", "ключ", "%s{}", "k" * 300]

        def body(store: TensorStore) -> None:
            for number, key in enumerate(keys):
                if store.rank == 0:
                    store.src_set(key, coded(number, device=self.home), 1)
                else:
                    take(store, key, coded(number, device=self.home))

            for key in keys if store.rank == 0 else ():
                store.src_wait_until_get_finished(key)

        self.ranks(body, 2)

    def test_stores_of_other_names_share_no_keys(self) -> None:
        def rank(ctx: RankContext) -> None:
            stores = [ctx.open_store(name, backend=self.backend) for name in ("one", "two")]
            for number, store in enumerate(stores):
                if store.rank == 0:
                    store.src_set("k", coded(number, device=self.home), 1)

            for number, store in reversed(list(enumerate(stores))):
                if store.rank == 1:
                    take(store, "k", coded(number, device=self.home))

            for store in stores:
                store.close()

        self.raw_ranks(rank, 2)

    def test_name_opened_again_starts_empty(self) -> None:
        def rank(ctx: RankContext) -> None:
            for turn in range(3):
                with ctx.open_store("kit", backend=self.backend) as store:
                    with pytest.raises(StoreTimeoutError):
                        store.dest_get("k", timeout=0.01)

                    store.barrier()
                    store.src_set("k" if store.rank == 0 else "other", coded(turn, device=self.home), 1)

        self.raw_ranks(rank, 2)
