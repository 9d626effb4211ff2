"""The four steps: who gets what, once each, and how long a wait lasts."""

from __future__ import annotations

import pytest
from torch import Tensor

from dtorch_core.errors import StoreTimeoutError
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import Background, asleep
from dtorch_core.testing._store_base import SHORT, WORLDS, StoreConformance, coded, same, take


class ExchangeTests(StoreConformance):
    """The handshake between one producer and its consumers."""

    @WORLDS
    def test_handshake_hands_every_consumer_the_value(self, world_size: int, device: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(1, (3, 5), device), world_size - 1)
                store.src_wait_until_get_finished("k")
            else:
                take(store, "k", coded(1, (3, 5), device))

        self.ranks(body, world_size, device)

    @WORLDS
    def test_handshake_from_every_rank_to_every_other(self, world_size: int, device: str) -> None:
        def body(store: TensorStore) -> None:
            store.src_set(f"of {store.rank}", coded(store.rank, (4,), device), world_size - 1)
            for rank in range(world_size):
                if rank != store.rank:
                    take(store, f"of {rank}", coded(rank, (4,), device))

            store.src_wait_until_get_finished(f"of {store.rank}")

        self.ranks(body, world_size, device)

    def test_handshake_of_a_rank_that_is_alone(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            store.barrier()
            store.src_set("k", coded(0, (4,), device), 1)
            take(store, "k", coded(0, (4,), device))
            store.src_wait_until_get_finished("k")
            store.reset()

        self.ranks(body, 1, device)

    def test_store_says_who_it_is(self) -> None:
        def body(store: TensorStore) -> None:
            assert (store.name, store.world_size, store.device) == ("kit", 3, self.home)
            assert store.backend == store.selection.chosen == self.backend
            assert [member.rank for member in store.topology] == [0, 1, 2]
            store.src_set(f"{store.rank}", coded(store.rank, device=self.home), 1)
            take(store, f"{store.rank}", coded(store.rank, device=self.home))

        self.ranks(body, 3)

    @WORLDS
    def test_consumers_may_come_first(self, world_size: int, device: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.barrier()
                store.src_set("k", coded(2, (4,), device), world_size - 1)
                store.src_wait_until_get_finished("k")
                return

            getter = Background(lambda: take(store, "k", coded(2, (4,), device)))
            asleep(getter)
            store.barrier()
            getter.result()

        self.ranks(body, world_size, device)

    def test_producer_may_be_among_its_consumers(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, (4,), device), 3)

            take(store, "k", coded(0, (4,), device))
            if store.rank == 0:
                store.src_wait_until_get_finished("k")

        self.ranks(body, 3, device)

    def test_get_count_is_how_many_get_it(self) -> None:
        """One share and two ranks that want it: the other one waits for the next time the key is set."""

        def body(store: TensorStore) -> str:
            values = [coded(turn, device=self.home) for turn in range(2)]
            if store.rank == 0:
                store.src_set("k", values[0], 1)
                store.barrier()
                store.barrier()
                store.src_wait_until_get_finished("k")
                store.src_set("k", values[1], 1)
                store.src_wait_until_get_finished("k")
                return ""

            store.barrier()
            try:
                got = store.dest_get("k", timeout=SHORT)
            except StoreTimeoutError:
                store.barrier()
                take(store, "k", values[1])
                return "second"

            store.barrier()  # both have asked by now
            assert same(got, values[0])
            store.dest_finish_get("k")
            return "first"

        assert sorted(self.ranks(body, 3)) == ["", "first", "second"]

    def test_wait_lasts_until_every_consumer_has_finished(self, device: str) -> None:
        """Got is not finished: the tensor is the producer's again when the last borrow ends, not before."""

        def body(store: TensorStore) -> None:
            tensor = coded(0, (4,), device)
            if store.rank == 0:
                store.src_set("k", tensor, 2)

            got = None
            for phase in ("nobody has got it", "both have", "one has finished"):
                if store.rank == 0:
                    with pytest.raises(StoreTimeoutError):
                        store.src_wait_until_get_finished("k", timeout=SHORT)

                store.barrier()
                if store.rank > 0 and phase == "nobody has got it":
                    got = store.dest_get("k")
                elif store.rank == 1 and phase == "both have":
                    store.dest_finish_get("k")

                store.barrier()

            if store.rank == 0:
                store.src_wait_until_get_finished("k")
                tensor.fill_(-1)
            elif store.rank == 2:
                assert got is not None
                assert same(got, coded(0, (4,), device))
                store.dest_finish_get("k")

        self.ranks(body, 3, device)

    def test_rank_gets_each_generation_once(self) -> None:
        """Its second get waits for the next generation, though a share of this one is left."""

        def body(store: TensorStore) -> None:
            values = [coded(turn, device=self.home) for turn in range(2)]
            if store.rank == 0:
                store.src_set("k", values[0], 2)
                store.barrier()
                store.src_wait_until_get_finished("k")
                store.src_set("k", values[1], 2)
                store.src_wait_until_get_finished("k")
                return

            if store.rank == 1:
                assert same(store.dest_get("k"), values[0])
                with pytest.raises(StoreTimeoutError):  # while it is borrowed
                    store.dest_get("k", timeout=SHORT)

                store.dest_finish_get("k")
                with pytest.raises(StoreTimeoutError):  # and afterwards
                    store.dest_get("k", timeout=SHORT)

            store.barrier()
            if store.rank == 2:
                take(store, "k", values[0])

            take(store, "k", values[1])

        self.ranks(body, 3)

    def test_fast_consumer_leaves_the_slow_one_its_share(self) -> None:
        turns = 20

        def take_all(store: TensorStore, values: list[Tensor]) -> None:
            for value in values:
                take(store, "k", value)

        def body(store: TensorStore) -> None:
            values = [coded(turn, device=self.home) for turn in range(turns)]
            if store.rank == 0:
                for turn in range(turns):
                    store.src_set("k", values[turn], 2)
                    if turn == 0:
                        store.barrier()

                    store.src_wait_until_get_finished("k")

                return

            if store.rank == 1:
                take(store, "k", values[0])
                ahead = Background(lambda: take_all(store, values[1:]))
                asleep(ahead)  # it asks for the second one before the slow rank has had the first
                store.barrier()
                ahead.result()
                return

            store.barrier()
            take_all(store, values)

        self.ranks(body, 3)

    @WORLDS
    def test_barrier_lets_nobody_through_early(self, world_size: int) -> None:
        here: list[int] = []

        def body(store: TensorStore) -> None:
            for turn in range(30):
                here.append(turn)
                store.barrier()
                assert here.count(turn) == world_size
                store.barrier()

        self.ranks(body, world_size)
