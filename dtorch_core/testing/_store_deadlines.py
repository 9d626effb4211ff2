"""Waits that end at their deadline: who is named, and that the wait can be tried again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dtorch_core.errors import ProtocolError, StoreTimeoutError
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._store_base import OWN, SHORT, StoreConformance, coded, take
from dtorch_core.testing._store_waits import (
    MEETINGS,
    WAITS_AND_RESET,
    Wait,
    get_wanted,
    set_unread,
    wait_for_unread,
)


class DeadlineTests(StoreConformance):
    """A timeout ends a wait in time, and takes nothing away."""

    @pytest.mark.parametrize("given", ["to the store", "to the call"])
    @WAITS_AND_RESET
    def test_timeout_ends_the_wait_and_says_who_has_not_come(self, wait: Wait, given: str) -> None:
        over, limit = threading.Event(), OWN if given == "to the store" else SHORT

        def body(store: TensorStore) -> None:
            if store.rank == 1:
                assert over.wait(self.patience)
                return

            set_unread(store, 0)
            begun = time.monotonic()
            with pytest.raises(StoreTimeoutError, match="rank 1") as caught:
                wait(store) if given == "to the store" else wait(store, timeout=SHORT)

            assert isinstance(caught.value, TimeoutError)
            assert 0.9 * limit < time.monotonic() - begun < self.patience / 4
            over.set()

        self.ranks(body, 2, timeout=OWN if given == "to the store" else None)

    def test_timeout_of_zero_takes_what_is_there(self) -> None:
        def to_device(store: TensorStore, timeout: float) -> object:
            return store.dest_get_to_device("wanted", self.home, timeout=timeout)

        def borrows(store: TensorStore, timeout: float) -> None:
            with store.borrow("wanted", timeout=timeout):
                pass

        def body(store: TensorStore) -> None:
            for get in (get_wanted, to_device, borrows):
                self._is_soon_late(store, get)

            set_unread(store, 0)
            self._is_soon_late(store, wait_for_unread)
            store.src_set("k", coded(0, device=self.home), 1)
            store.dest_get("k", timeout=0)
            store.dest_finish_get("k")
            store.src_wait_until_get_finished("k", timeout=0)
            store.barrier(timeout=0)
            store.reset(timeout=0)

        self.ranks(body, 1)

    @MEETINGS
    def test_timeout_of_zero_does_not_wait_for_other_ranks(self, wait: Wait) -> None:
        over = threading.Event()

        def body(store: TensorStore) -> None:
            if store.rank == 1:
                assert over.wait(self.patience)
                return

            try:
                self._is_soon_late(store, wait)
            finally:
                over.set()

        self.ranks(body, 2)

    def _is_soon_late(self, store: TensorStore, wait: Wait) -> None:
        """Zero is no word for the store's own timeout, which is long; nor for a short one of the backend's.

        A busy machine makes many looks slow, but hardly twenty of them: the quickest one counts, mostly the first.
        """
        quickest = self.patience
        for _ in range(20):
            begun = time.monotonic()
            with pytest.raises(StoreTimeoutError):
                wait(store, timeout=0)

            took = time.monotonic() - begun
            assert took < self.patience / 4, "a timeout of zero was not taken for one"
            quickest = min(quickest, took)
            if quickest < SHORT:
                return

        raise AssertionError(f"a look waits: the quickest of twenty with a timeout of zero took {quickest:.3f} s")

    def test_get_can_be_retried_after_a_timeout(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 1:
                for _ in range(3):
                    with pytest.raises(StoreTimeoutError):
                        store.dest_get("k", timeout=SHORT / 3)

            store.barrier()
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)
                store.src_wait_until_get_finished("k")
            else:
                take(store, "k", coded(0, device=self.home))

        self.ranks(body, 2)

    def test_wait_can_be_retried_after_a_timeout(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)
                for _ in range(3):
                    with pytest.raises(StoreTimeoutError):
                        store.src_wait_until_get_finished("k", timeout=SHORT / 3)

            store.barrier()
            if store.rank == 1:
                take(store, "k", coded(0, device=self.home))
            else:
                store.src_wait_until_get_finished("k")
                with pytest.raises(ProtocolError):
                    store.src_wait_until_get_finished("k")

        self.ranks(body, 2)

    def test_wait_names_who_got_it_and_did_not_finish(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 2)

            store.barrier()
            if store.rank == 2:
                store.dest_get("k")

            store.barrier()
            if store.rank == 0:
                with pytest.raises(StoreTimeoutError, match="rank 1") as caught:
                    store.src_wait_until_get_finished("k", timeout=SHORT)

                assert "rank 2" in str(caught.value)

            store.barrier()
            if store.rank == 2:
                store.dest_finish_get("k")

        self.ranks(body, 3)

    @MEETINGS
    def test_collective_can_be_retried_after_a_timeout(self, wait: Wait) -> None:
        """Whether or not the rank that gave up counts as having come: all pass in the end, in step."""
        gave_up = threading.Event()

        def rank(ctx: RankContext) -> None:
            timeout = OWN if ctx.rank == 0 else self.patience / 2
            with ctx.open_store("kit", backend=self.backend, timeout=timeout) as store:
                if store.rank == 0:
                    with pytest.raises(StoreTimeoutError, match="rank 1, rank 2"):
                        wait(store)

                    gave_up.set()

                assert gave_up.wait(self.patience)
                self._persist(lambda: wait(store))
                self._persist(store.barrier)

        self.raw_ranks(rank, 3)

    @MEETINGS
    def test_collective_does_not_count_a_rank_that_gave_up(self, wait: Wait) -> None:
        """It has gone on to other things: nobody passes without it, and a reset takes no key of its."""
        met = threading.Barrier(3)

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                with pytest.raises(StoreTimeoutError):
                    wait(store, timeout=SHORT)

                store.src_set("kept", coded(0, device=self.home), 2)
                # What the others get from it now comes later than the news that it does not stand there any more.
                store.src_set("go", coded(1, device=self.home), 2)
                store.src_wait_until_get_finished("go")
            else:
                take(store, "go", coded(1, device=self.home))

            met.wait(self.patience)
            if store.rank > 0:
                with pytest.raises(StoreTimeoutError):
                    wait(store, timeout=SHORT)

            met.wait(self.patience)
            if store.rank > 0:
                take(store, "kept", coded(0, device=self.home))
            else:
                store.src_wait_until_get_finished("kept")

            met.wait(self.patience)
            self._persist(lambda: wait(store))  # and with it all do

        self.ranks(body, 3)

    def test_timeout_never_loses_a_share(self) -> None:
        """Deadlines that fall just when the key is set: every generation arrives once, whoever was quicker."""
        turns = 60

        def body(store: TensorStore) -> None:
            for turn in range(turns):
                value = coded(turn, device=self.home)
                if store.rank == 0:
                    store.src_set("k", value, 2)
                    self._persist(lambda: store.src_wait_until_get_finished("k", timeout=0.001))
                else:
                    timeout = 0.0003 * (1 + turn % 7)
                    got = self._persist(lambda: store.dest_get("k", timeout=timeout))  # noqa: B023 - called at once
                    assert got.equal(value)  # type: ignore[attr-defined]
                    store.dest_finish_get("k")

        self.ranks(body, 3)

    def _persist(self, wait: Callable[[], object]) -> object:
        for _ in range(10_000):
            try:
                return wait()
            except StoreTimeoutError:
                pass

        raise AssertionError("what was waited for never came")
