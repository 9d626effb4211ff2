"""Several threads of one rank on one store."""

from __future__ import annotations

from dtorch_core.errors import StoreTimeoutError
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import Background
from dtorch_core.testing._store_base import SHORT, StoreConformance, coded, same, take


class ThreadTests(StoreConformance):
    """They share its keys, and do not disturb each other."""

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
