"""Close, and the goodbye of an orderly return: which waits they end, and which go on."""

from __future__ import annotations

import threading

import pytest
import torch

from dtorch_core.errors import AbortedError, PeerLostError, StoreTimeoutError
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import Background, asleep
from dtorch_core.testing._store_base import SHORT, StoreConformance, coded, take
from dtorch_core.testing._store_waits import (
    WAITS_AND_RESET,
    Wait,
    get_wanted,
    meet,
    reset,
    set_unread,
    wait_for_unread,
)


class GoodbyeTests(StoreConformance):
    """A rank that has left ends the waits that need it, and no others."""

    def test_close_may_be_repeated_and_ends_the_handle(self) -> None:
        def body(store: TensorStore) -> None:
            store.barrier()
            store.close()
            store.close()
            for call in (
                lambda: store.src_set("k", coded(0, device=self.home), 1),
                lambda: store.dest_get("k"),
                lambda: store.src_wait_until_get_finished("k"),
                store.barrier,
                store.reset,
                lambda: store.empty((2,), dtype=torch.float32),
            ):
                with pytest.raises(AbortedError):
                    call()

        self.ranks(body, 2)

    @WAITS_AND_RESET
    def test_close_wakes_pending_waits_of_its_own_rank(self, wait: Wait) -> None:
        over = threading.Event()

        def body(store: TensorStore) -> None:
            if store.rank == 1:
                assert over.wait(self.patience)
                return

            set_unread(store, 0)
            pending = Background(lambda: wait(store))
            asleep(pending)
            store.close()
            with pytest.raises(AbortedError):
                pending.result()

            over.set()

        self.ranks(body, 2)

    @WAITS_AND_RESET
    def test_goodbye_of_the_last_other_rank_ends_waits(self, wait: Wait) -> None:
        """Those that are pending, and those that come later."""
        ready = threading.Event()

        def body(store: TensorStore) -> None:
            set_unread(store, 0)
            if store.rank == 1:
                assert ready.wait(self.patience)
                store.close()
                return

            pending = Background(lambda: wait(store))
            asleep(pending)
            ready.set()
            with pytest.raises(PeerLostError, match="rank 1"):
                pending.result()

            with pytest.raises(PeerLostError, match="rank 1"):
                wait(store)

        self.ranks(body, 2)

    def test_goodbye_leaves_waits_that_another_rank_can_satisfy(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("of 0", coded(0, device=self.home), 1)

            store.barrier()
            if store.rank == 2:
                store.close()
                return

            if store.rank == 0:
                with pytest.raises(StoreTimeoutError):
                    store.dest_get("of 1", timeout=SHORT)

                with pytest.raises(StoreTimeoutError):
                    store.src_wait_until_get_finished("of 0", timeout=SHORT)

                store.src_set("go", coded(0, device=self.home), 1)
                take(store, "of 1", coded(1, device=self.home))
                store.src_wait_until_get_finished("of 0")
                return

            take(store, "go", coded(0, device=self.home))
            store.src_set("of 1", coded(1, device=self.home), 1)
            take(store, "of 0", coded(0, device=self.home))
            store.src_wait_until_get_finished("of 1")

        self.ranks(body, 3)

    @pytest.mark.parametrize("wait", [wait_for_unread, meet, reset], ids=["wait", "barrier", "reset"])
    def test_goodbye_ends_waits_that_need_the_rank(self, wait: Wait) -> None:
        """A barrier and a reset need every rank; a key with two consumers to come needs two."""
        over = threading.Event()

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("unread", coded(0, device=self.home), 2)

            store.barrier()
            if store.rank == 0:
                with pytest.raises(PeerLostError, match="rank 2"):
                    wait(store)

                over.set()
            elif store.rank == 1:
                assert over.wait(self.patience)

        self.ranks(body, 3)

    def test_goodbye_with_a_borrow_ends_the_producers_wait(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)
                with pytest.raises(PeerLostError, match="rank 1"):
                    store.src_wait_until_get_finished("k")

            elif store.rank == 1:
                store.dest_get("k")
                store.close()
            else:
                with pytest.raises(PeerLostError):
                    store.dest_get("never set")

        self.ranks(body, 3)

    @pytest.mark.parametrize("how", ["closed", "in reset"])
    def test_share_is_there_for_the_last_rank_that_is_left(self, how: str) -> None:
        """Fewer shares than ranks that may want one, and neither the producer nor the third rank wants any more."""

        def body(store: TensorStore) -> None:
            for turn in range(20):
                key = f"k{turn}"
                if store.rank == 0:
                    store.src_set(key, coded(turn, device=self.home), 1)
                elif store.rank == 1:
                    take(store, key, coded(turn, device=self.home))

                if how == "closed":
                    break

                store.reset()

            if how == "closed":
                store.close()

        for _ in range(1 if how == "in reset" else 10):
            self.ranks(body, 3)

    def test_abort_before_the_goodbye_is_what_the_others_hear(self) -> None:
        def body(store: TensorStore) -> None:
            store.barrier()
            if store.rank == 0:
                store.abort("the test wants it so")
                store.close()
                return

            for wait in (get_wanted, meet, reset):
                with pytest.raises((AbortedError, PeerLostError), match="the test wants it so"):
                    wait(store)

        for _ in range(10):
            self.ranks(body, 3)

    def test_goodbye_after_finish_is_no_loss(self) -> None:
        """What a rank did before it left counts: its finish, and what it has published."""

        def body(store: TensorStore) -> None:
            if store.rank == 1:
                take(store, "k", coded(0, device=self.home))
                store.src_set("left", coded(1, device=self.home), 1)
                store.close()
                return

            store.src_set("k", coded(0, device=self.home), 1)
            with pytest.raises(PeerLostError):
                store.dest_get("never set")

            store.src_wait_until_get_finished("k")
            take(store, "left", coded(1, device=self.home))

        self.ranks(body, 2)

    def test_borrow_outlives_the_producers_goodbye(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)
                store.barrier()
                store.close()
                return

            got = store.dest_get("k")
            store.barrier()
            with pytest.raises(PeerLostError):
                store.dest_get("never set")

            assert got.equal(coded(0, device=self.home))
            store.dest_finish_get("k")

        self.ranks(body, 2)

    def test_orderly_return_says_goodbye(self) -> None:
        """A rank that returns with its store open has left as if it had closed it; the others work on."""

        def rank(ctx: RankContext) -> str:
            store = ctx.open_store("kit", backend=self.backend, timeout=self.patience / 2)
            if ctx.rank == 2:
                return "early"

            with pytest.raises(PeerLostError, match="rank 2"):
                store.barrier()

            store.src_set(f"of {ctx.rank}", coded(ctx.rank, device=self.home), 1)
            take(store, f"of {1 - ctx.rank}", coded(1 - ctx.rank, device=self.home))
            store.src_wait_until_get_finished(f"of {ctx.rank}")
            return "late"

        assert self.raw_ranks(rank, 3) == ["late", "late", "early"]
