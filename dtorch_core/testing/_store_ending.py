"""Waits that end otherwise: at their deadline, by reset or close, and because a rank left or died."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from dtorch_core.errors import (
    AbortedError,
    DtorchError,
    PeerLostError,
    ProtocolError,
    RankFailedError,
    StoreTimeoutError,
)
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import Background, asleep
from dtorch_core.testing._store_base import OWN, SHORT, Ending, StoreConformance, coded, take

Wait = Callable[..., object]
"""One of the four below: takes the store and ``timeout``."""


def _get(store: TensorStore, timeout: float | None = None) -> object:
    return store.dest_get("wanted", timeout=timeout)


def _finished(store: TensorStore, timeout: float | None = None) -> object:
    """Its key is set before, by :meth:`EndingTests._prepare`."""
    return store.src_wait_until_get_finished("unread", timeout=timeout)


def _barrier(store: TensorStore, timeout: float | None = None) -> object:
    return store.barrier(timeout=timeout)


def _reset(store: TensorStore, timeout: float | None = None) -> object:
    return store.reset(timeout=timeout)


WAITS = pytest.mark.parametrize("wait", [_get, _finished, _barrier], ids=["get", "wait", "barrier"])
WAITS_AND_RESET = pytest.mark.parametrize(
    "wait", [_get, _finished, _barrier, _reset], ids=["get", "wait", "barrier", "reset"]
)


class EndingTests(StoreConformance):
    """How waits end when what they wait for does not come."""

    def _prepare(self, store: TensorStore, rank: int) -> None:
        if store.rank == rank:
            store.src_set("unread", coded(0, device=self.home), 1)

    # Deadlines

    @pytest.mark.parametrize("given", ["to the store", "to the call"])
    @WAITS_AND_RESET
    def test_timeout_ends_the_wait_and_says_who_has_not_come(self, wait: Wait, given: str) -> None:
        over, limit = threading.Event(), OWN if given == "to the store" else SHORT

        def body(store: TensorStore) -> None:
            if store.rank == 1:
                assert over.wait(self.patience)
                return

            self._prepare(store, 0)
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
            for get in (_get, to_device, borrows):
                self._is_soon_late(store, get)

            self._prepare(store, 0)
            self._is_soon_late(store, _finished)
            store.src_set("k", coded(0, device=self.home), 1)
            store.dest_get("k", timeout=0)
            store.dest_finish_get("k")
            store.src_wait_until_get_finished("k", timeout=0)
            store.barrier(timeout=0)
            store.reset(timeout=0)

        self.ranks(body, 1)

    @pytest.mark.parametrize("wait", [_barrier, _reset], ids=["barrier", "reset"])
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

    @pytest.mark.parametrize("wait", [_barrier, _reset], ids=["barrier", "reset"])
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

    @pytest.mark.parametrize("wait", [_barrier, _reset], ids=["barrier", "reset"])
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

    # Reset

    def test_reset_drops_every_key(self) -> None:
        def body(store: TensorStore) -> None:
            for turn in range(3):
                own = f"of {store.rank}"
                store.src_set(own, coded(turn, device=self.home), 2)
                borrowed = f"of {(store.rank + 1) % 3}"
                store.dest_get(borrowed)
                store.reset()
                with pytest.raises(DtorchError):
                    store.dest_finish_get(borrowed)

                with pytest.raises(ProtocolError):
                    store.src_wait_until_get_finished(own)

                with pytest.raises(StoreTimeoutError):
                    store.dest_get(borrowed, timeout=0.01)

                store.barrier()

            if store.rank == 0:
                store.src_set("of 0", coded(9, device=self.home), 2)
                store.src_wait_until_get_finished("of 0")
            else:
                take(store, "of 0", coded(9, device=self.home))

        self.ranks(body, 3)

    @WAITS
    def test_reset_wakes_pending_waits(self, wait: Wait) -> None:
        """Of the ranks that reset, in other threads of theirs."""

        def body(store: TensorStore) -> None:
            self._prepare(store, 1)
            pending = Background(lambda: wait(store)) if store.rank == 1 else None
            if pending is not None:
                asleep(pending)

            store.reset()
            if pending is not None:
                with pytest.raises(AbortedError):
                    pending.result()

            store.barrier()
            if store.rank == 0:
                store.src_set("wanted", coded(0, device=self.home), 2)
                store.src_wait_until_get_finished("wanted")
            else:
                take(store, "wanted", coded(0, device=self.home))

        self.ranks(body, 3)

    def test_reset_is_collective(self) -> None:
        """No key goes before the last rank has come."""
        begun = threading.Event()

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)
                early = Background(store.reset)
                asleep(early)
                begun.set()
                early.result()
                return

            assert begun.wait(self.patience)
            take(store, "k", coded(0, device=self.home))
            store.reset()

        self.ranks(body, 2)

    # Close, and the goodbye of an orderly return

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

            self._prepare(store, 0)
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
            self._prepare(store, 0)
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

    @pytest.mark.parametrize("wait", [_finished, _barrier, _reset], ids=["wait", "barrier", "reset"])
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

            for wait in (_get, _barrier, _reset):
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

    # Death

    @WAITS_AND_RESET
    def test_death_ends_every_wait_of_every_survivor(self, wait: Wait) -> None:
        """Pending and later ones, also those that another rank could satisfy: the store has to be opened anew."""

        def waits(store: TensorStore) -> tuple[Ending, Sequence[Ending]]:
            store.src_set(f"of {store.rank}", coded(0, device=self.home), 1)

            def own() -> object:
                return store.src_wait_until_get_finished(f"of {store.rank}") if wait is _finished else wait(store)

            return own, [own]

        for error in self.told_of_a_death(waits):
            assert str(os.getpid()) in str(error)

    def test_death_leaves_what_is_satisfied(self) -> None:
        """A key that is set can be got, and a wait whose consumers have finished returns."""
        seen: list[str] = []

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("finished", coded(0, device=self.home), 1)
                store.src_set("set", coded(1, device=self.home), 1)

            if store.rank == 1:
                take(store, "finished", coded(0, device=self.home))

            store.barrier()
            if store.rank == 2:
                raise ZeroDivisionError("rank 2 fails on purpose")

            with pytest.raises(PeerLostError):
                store.dest_get("never set")

            if store.rank == 0:
                store.src_wait_until_get_finished("finished")
            else:
                take(store, "set", coded(1, device=self.home))

            seen.append("satisfied")

        with pytest.raises(RankFailedError, match="on purpose"):
            self.ranks(body, 3)

        assert seen == ["satisfied"] * 2

    def test_abort_ends_every_wait(self) -> None:
        def body(store: TensorStore) -> None:
            store.barrier()
            if store.rank == 0:
                store.abort("the test wants it so")

            for wait in (_get, _barrier, _reset):
                with pytest.raises((AbortedError, PeerLostError)):
                    wait(store)

        self.ranks(body, 2)
