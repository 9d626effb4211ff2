"""A rank that dies, or aborts, ends every wait."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from dtorch_core.errors import AbortedError, PeerLostError, RankFailedError
from dtorch_core.store import TensorStore
from dtorch_core.testing._store_base import Ending, StoreConformance, coded, take
from dtorch_core.testing._store_waits import WAITS_AND_RESET, Wait, get_wanted, meet, reset, wait_for_unread


class DeathTests(StoreConformance):
    """No wait outlasts it, and what is satisfied stays."""

    @WAITS_AND_RESET
    def test_death_ends_every_wait_of_every_survivor(self, wait: Wait) -> None:
        """Pending and later ones, also those that another rank could satisfy: the store has to be opened anew."""

        def waits(store: TensorStore) -> tuple[Ending, Sequence[Ending]]:
            store.src_set(f"of {store.rank}", coded(0, device=self.home), 1)

            def own() -> object:
                return store.src_wait_until_get_finished(f"of {store.rank}") if wait is wait_for_unread else wait(store)

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

            for wait in (get_wanted, meet, reset):
                with pytest.raises((AbortedError, PeerLostError)):
                    wait(store)

        self.ranks(body, 2)
