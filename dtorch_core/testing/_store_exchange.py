"""The four steps: who gets what, once each, and when a key is free again."""

from __future__ import annotations

import random

import pytest
import torch

from dtorch_core.errors import KeyInUseError, ProtocolError, StoreTimeoutError
from dtorch_core.launcher import RankContext
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

        def take_all(store: TensorStore, values: list[torch.Tensor]) -> None:
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

    def test_live_key_refuses_a_second_set(self) -> None:
        """By whichever rank, and until its producer has waited; the first value is unharmed."""

        def body(store: TensorStore) -> None:
            value, other = coded(0, device=self.home), coded(1, device=self.home)
            if store.rank == 0:
                store.src_set("k", value, 1)

            store.barrier()
            with pytest.raises(KeyInUseError, match="'k'"):
                store.src_set("k", other, 1)

            store.barrier()
            if store.rank == 1:
                take(store, "k", value)

            store.barrier()
            with pytest.raises(KeyInUseError):
                store.src_set("k", other, 1)

            store.barrier()
            if store.rank == 0:
                store.src_wait_until_get_finished("k")
                store.src_set("k", other, 1)
                store.src_wait_until_get_finished("k")
            else:
                take(store, "k", other)

        self.ranks(body, 2)

    def test_finish_without_a_get_is_an_error(self) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(ProtocolError):
                store.dest_finish_get("never set")

            store.barrier()
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 2)

            store.barrier()
            if store.rank == 1:
                with pytest.raises(ProtocolError, match="rank 1"):
                    store.dest_finish_get("k")

                take(store, "k", coded(0, device=self.home))
                with pytest.raises(ProtocolError, match="rank 1"):
                    store.dest_finish_get("k")

            store.barrier()
            if store.rank == 2:
                take(store, "k", coded(0, device=self.home))
            elif store.rank == 0:
                store.src_wait_until_get_finished("k")

        self.ranks(body, 3)

    def test_wait_for_a_key_never_set_is_an_error(self) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(ProtocolError, match="'never set'"):
                store.src_wait_until_get_finished("never set")

            store.barrier()
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)

            store.barrier()
            if store.rank == 1:
                with pytest.raises(ProtocolError):  # only the producer waits
                    store.src_wait_until_get_finished("k")

                take(store, "k", coded(0, device=self.home))
                return

            store.src_wait_until_get_finished("k")
            with pytest.raises(ProtocolError):  # free again
                store.src_wait_until_get_finished("k")

        self.ranks(body, 2)

    @pytest.mark.parametrize("get_count", [0, -1, 1.0, True, None], ids=str)
    def test_get_count_below_one_is_an_error(self, get_count: int) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(ProtocolError, match="get_count"):
                store.src_set("k", coded(0, device=self.home), get_count)

            store.src_set("k", coded(1, device=self.home), 1)  # the key is free
            take(store, "k", coded(1, device=self.home))
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1)

    @WORLDS
    def test_get_count_above_the_number_of_ranks_is_an_error(self, world_size: int) -> None:
        """Each rank gets it at most once, so that the wait could never end. All of them may, the producer too."""

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                with pytest.raises(ProtocolError, match=rf"'k'.*get_count is {world_size + 1}.*{world_size} ranks"):
                    store.src_set("k", coded(0, device=self.home), world_size + 1)

                store.src_set("k", coded(1, device=self.home), world_size)  # the key is free

            take(store, "k", coded(1, device=self.home))
            if store.rank == 0:
                store.src_wait_until_get_finished("k")

        self.ranks(body, world_size)

    def test_threads_of_one_rank_work_on_keys_of_their_own(self) -> None:
        def body(store: TensorStore) -> None:
            def thread(number: int) -> None:
                for turn in range(10):
                    value = coded(100 * number + turn, device=self.home)
                    if store.rank == 0:
                        store.src_set(f"{number}", value, 1)
                        store.src_wait_until_get_finished(f"{number}")
                    else:
                        take(store, f"{number}", value)

            threads = [Background(lambda number=number: thread(number)) for number in range(6)]  # type: ignore[misc]
            for running in threads:
                running.result()

        self.ranks(body, 2)

    def test_threads_of_one_rank_get_a_generation_once_together(self) -> None:
        def body(store: TensorStore) -> int:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 2)
                store.barrier()
                store.barrier()
                store.src_wait_until_get_finished("k")
                return 0

            store.barrier()
            got = 0
            if store.rank == 1:
                tries = [Background(lambda: store.dest_get("k", timeout=SHORT)) for _ in range(4)]
                for one in tries:
                    try:
                        assert same(one.result(), coded(0, device=self.home))
                        got += 1
                    except StoreTimeoutError:
                        pass

                Background(lambda: store.dest_finish_get("k")).result()

            store.barrier()
            if store.rank == 2:
                take(store, "k", coded(0, device=self.home))

            return got

        assert self.ranks(body, 3) == [0, 1, 0]

    def test_waits_for_other_keys_change_nothing(self) -> None:
        """A hundred threads that wait for keys of their own: each gets it in the end, and no other is disturbed."""

        def body(store: TensorStore) -> None:
            def waiter(number: int) -> None:
                take(store, f"of waiter {number}", coded(number, device=self.home))

            waiting = [
                Background(lambda number=number: waiter(number))  # type: ignore[misc]
                for number in range(100)
                if store.rank == 1
            ]
            store.barrier()
            for turn in range(20):
                if store.rank == 0:
                    store.src_set("k", coded(turn, device=self.home), 1)
                    store.src_wait_until_get_finished("k")
                else:
                    take(store, "k", coded(turn, device=self.home))

            for number in range(100) if store.rank == 0 else ():
                store.src_set(f"of waiter {number}", coded(number, device=self.home), 1)

            for running in waiting:
                running.result()

        self.ranks(body, 2)

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
